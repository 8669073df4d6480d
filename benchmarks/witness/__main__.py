"""Reads the time that is drawn into frames, as the pipeline hands them to a model, and judges them.

    python -m benchmarks.witness --frames 10000       writes benchmarks/results/witness.md
    python -m benchmarks.witness --only "end cut"     clips whose name has this, without a file of results

Exits with 1 where a frame is wrong or cannot be read, with 2 where tesseract is missing.
"""

from __future__ import annotations

import argparse
import datetime
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

from benchmarks.reporting import RESULTS, table
from benchmarks.witness import kinds, timecode
from benchmarks.witness.clips import Clip, write
from benchmarks.witness.handed import FAMILIES, Model, handed_by_ask, handed_by_children
from benchmarks.witness.judge import Verdict, judged, refused
from epd.encoders import FrameSampling, MediaPlan, VideoFacts
from epd.errors import EPDError
from epd.video import ChildLimits, MediaChildren

_MAX_FRAMES = 48  # of one question
_AT_RATE = 47.3  # the same, where a rate is asked for: far from what rounding may miss by one
_CHILDREN_EVERY = 4  # of the questions, one is read as a server reads it
_SEED = 20261126


class Witness:
    """Asks for frames of clips, as all families in turn, and judges them."""

    def __init__(self, folder: Path, rng: random.Random, families: Sequence[str] = FAMILIES) -> None:
        """Makes the models. folder: for them and the clips."""
        self._folder, self._rng = folder, rng
        self.models = [Model(family, folder / family) for family in families]
        self._children = MediaChildren(ChildLimits(max_children=2), decodes_video=True)
        self._num_asked = 0

    def close(self) -> None:
        self._children.close()

    def look_at(self, clip: Clip, num_frames: int, drawn_ms: Sequence[int] | None = None) -> Verdict:
        """Encodes a clip and judges at least so many frames of it. drawn_ms: see `write`."""
        path = self._folder / f"clip.{clip.container}"
        clip = write(clip, path, drawn_ms)
        verdict = Verdict()
        while verdict.num_read + verdict.num_unreadable + verdict.num_wrong < num_frames:
            verdict.add(self.asked(clip, path, self._drawn_sampling(clip)))
        return verdict

    def asked(self, clip: Clip, path: Path, sampling: FrameSampling) -> Verdict:
        """Asks one question about a clip that is written to `path`, as the next family."""
        model = self.models[self._num_asked % len(self.models)]
        self._num_asked += 1
        wanted = self._wanted(model, clip, sampling)
        pixels = model.pixels(wanted.num_frames)
        try:
            handed = (
                handed_by_ask(model, path, sampling, pixels)
                if self._num_asked % _CHILDREN_EVERY
                else handed_by_children(model, path, sampling, pixels, self._children)
            )
        except EPDError as error:
            return refused(wanted, error)
        verdict = judged(clip, wanted, handed, timecode.read(handed.frames), model.family)
        verdict.reasons = [f"{_named(model, sampling)}: {reason}" for reason in verdict.reasons]
        return verdict

    def _wanted(self, model: Model, clip: Clip, sampling: FrameSampling) -> MediaPlan:
        """Plans what is really shown, as the family would."""
        facts = VideoFacts(clip.num_shown, clip.rate_per_s, timecode.HEIGHT, timecode.WIDTH)
        plan: MediaPlan = model.adapter.plan_video(facts, sampling, model.pixels(_MAX_FRAMES))
        return plan

    def _drawn_sampling(self, clip: Clip) -> FrameSampling:
        """Draws a rate, a number of frames, or a part of the clip, of which few or all frames are wanted."""
        rng, length_s = self._rng, float(clip.duration_s)
        kind = rng.choice(("rate", "number", "part", "all of a part"))
        if kind == "number":
            return FrameSampling(num_frames=rng.randint(2, min(_MAX_FRAMES, clip.num_shown)))
        if kind == "rate":
            return FrameSampling(fps=min(rng.choice((0.2, 0.5, 1.0, 2.0, 4.0)), _AT_RATE / length_s))
        if kind == "part":
            start_s = rng.uniform(0, 0.7) * length_s
            end_s = start_s + rng.uniform(0.25, 1) * (length_s - start_s)
            return FrameSampling(min(2.0, _AT_RATE / (end_s - start_s)), start_s=start_s, end_s=end_s)
        start = rng.randrange(max(clip.num_shown - 24, 1))
        # Between two frames, as containers round the times at which frames begin.
        start_s = max(start - 0.5, 0.0) / clip.rate_per_s
        return FrameSampling(takes_all=True, start_s=start_s, end_s=start_s + 24 / clip.rate_per_s)


def _named(model: Model, sampling: FrameSampling) -> str:
    changed = {
        name: value
        for name in ("fps", "num_frames", "start_s", "end_s", "takes_all")
        if (value := getattr(sampling, name))
    }
    return f"{model.family}, " + " ".join(f"{name}={value}" for name, value in changed.items())


def run(num_frames: int, only: str = "", families: Sequence[str] = FAMILIES) -> list[tuple[Clip, Verdict]]:
    """Looks at all clips whose name has `only` in it, at `num_frames` of them in all or somewhat more."""
    rng = random.Random(_SEED)
    clips = [clip for clip in kinds.clips(rng) if only in clip.name]
    found: list[tuple[Clip, Verdict]] = []
    begin_s = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        witness = Witness(Path(folder), rng, families)
        for place, clip in enumerate(clips):
            seen = sum(verdict.num_read + verdict.num_unreadable + verdict.num_wrong for _, verdict in found)
            verdict = witness.look_at(clip, max(-(-(num_frames - seen) // (len(clips) - place)), 1))
            found.append((clip, verdict))
            _show(place, len(clips), clip, verdict, perf_counter() - begin_s)
        witness.close()
    return found


def _show(place: int, number: int, clip: Clip, verdict: Verdict, seconds: float) -> None:
    print(
        f"{place + 1:>4} of {number}, {seconds:5.0f} s: {clip.name}: {verdict.num_read} read, "
        f"{verdict.num_wrong} wrong, {verdict.num_unreadable} unreadable",
        *(f"      {reason}" for reason in verdict.reasons[:4]),
        sep="\n",
        flush=True,
    )


def report(found: Sequence[tuple[Clip, Verdict]], command: str) -> str:
    """Returns the page of results."""
    total = Verdict()
    for _, verdict in found:
        total.add(verdict)
    lines = [
        "# Frames read by a witness",
        "",
        f"`{command}`",
        "",
        f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        f"- clips: {len(found)}",
        f"- frames read: {total.num_read:,}",
        f"- wrong: {total.num_wrong}",
        f"- unreadable: {total.num_unreadable}",
        "",
        "A frame is right where three times agree: the one asked for, the one planned, and the one that is",
        "drawn into the frame that goes into the vision tower. Cells count the frames read. Brackets hold",
        "wrong and unreadable ones, where there are any.",
        "",
        "## Container and rate",
        "",
        _grid(found),
        "",
        "## Kinds",
        "",
        table(
            [{"kind": kind, **_counts(verdict)} for kind, verdict in _grouped(found, lambda clip: clip.kind)]
        ),
        "",
        "## Codecs",
        "",
        table([{"codec": codec, **_counts(verdict)} for codec, verdict in _grouped(found, _codec)]),
    ]
    wrong = [(clip, verdict) for clip, verdict in found if verdict.num_wrong or verdict.num_unreadable]
    if wrong:
        lines += ["", "## Wrong", ""]
        lines += [
            f"- {clip.name}: {verdict.num_wrong} wrong; {'; '.join(verdict.reasons[:2])}"
            for clip, verdict in wrong
        ]
    return "\n".join(lines) + "\n"


def _codec(clip: Clip) -> str:
    return ", ".join(filter(None, (clip.encoding.codec, clip.encoding.structure)))


def _grouped(
    found: Sequence[tuple[Clip, Verdict]], key: Callable[[Clip], str]
) -> Iterator[tuple[str, Verdict]]:
    groups: dict[str, Verdict] = defaultdict(Verdict)
    for clip, verdict in found:
        groups[key(clip)].add(verdict)
    return iter(groups.items())


def _counts(verdict: Verdict) -> dict[str, int]:
    return {
        "frames read": verdict.num_read,
        "wrong": verdict.num_wrong,
        "unreadable": verdict.num_unreadable,
    }


def _grid(found: Sequence[tuple[Clip, Verdict]]) -> str:
    cells = dict(_grouped(found, lambda clip: f"{clip.container} {clip.rate}"))
    containers = list(dict.fromkeys(clip.container for clip, _ in found))
    rates = [f"{float(rate):.5g}" for rate in kinds.RATES.values()] + ["variable"]
    return table(
        [
            {"container": container} | {rate: _cell(cells.get(f"{container} {rate}")) for rate in rates}
            for container in containers
        ]
    )


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    bad = verdict.num_wrong or verdict.num_unreadable
    return f"{verdict.num_read}" + (f" ({verdict.num_wrong}, {verdict.num_unreadable})" if bad else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.witness", description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000, help="read at least so many")
    parser.add_argument("--only", default="", help="clips whose name has this in it; writes no results")
    options = parser.parse_args(arguments)
    if not timecode.is_installed():
        print("tesseract is not on the PATH; install the package tesseract-ocr", file=sys.stderr)
        return 2
    found = run(options.frames, options.only)
    page = report(found, f"python -m benchmarks.witness --frames {options.frames}")
    if not options.only:
        (RESULTS / "witness.md").write_text(page, encoding="utf-8")
    print(page)
    return int(any(verdict.num_wrong or verdict.num_unreadable for _, verdict in found))


if __name__ == "__main__":
    sys.exit(main())
