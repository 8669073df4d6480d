"""Last step: measures a checkpoint on held-out scenes and writes its model card.

    python -m training.evaluate --videos 100 --card epd/models/shapes-vl/MODEL_CARD.md

Every video is drawn from a held-out seed, written as an H.264 file, and asked about through the colocated
pipeline, the way a user would: the whole path from bytes to answer. One frame per second, all visual tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from epd.engine_config import EngineConfig
from epd.models import embedded_model_path
from epd.shapes import Question, make_questions, make_scene
from epd.shapes.questions import ONE_WORD_KINDS
from epd.video.demo_video import write_demo_video
from tests.colocated import ColocatedPipeline
from training.clips import HELD_OUT_SEED

LENGTHS = (8, 32, 128, 512)
_SOURCE_FPS = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """One question put to the model about a video of `num_frames` sampled frames."""

    num_frames: int
    seed: int
    question: Question
    answer: str

    @property
    def is_right(self) -> bool:
        return self.question.is_answered_by(self.answer)


def evaluate(pipeline: ColocatedPipeline, num_frames: int, num_videos: int) -> Iterator[Verdict]:
    """Asks one question of every kind about each of `num_videos` fresh videos of `num_frames` seconds."""
    for number in range(num_videos):
        seed = HELD_OUT_SEED + num_frames * 100_000 + number
        scene = make_scene(seed, float(num_frames))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            write_demo_video(path, scene, fps=_SOURCE_FPS, height=360, width=640)
            context = pipeline.prefill_media([path], num_frames=num_frames)
        for question in make_questions(scene, random.Random(seed), time_margin_s=2.0):
            answer = pipeline.answer(context, question.text, max_tokens=16)
            yield Verdict(num_frames, seed, question, answer.text)


def accuracy(verdicts: list[Verdict]) -> float:
    return sum(verdict.is_right for verdict in verdicts) / len(verdicts)


def _cell(verdicts: list[Verdict]) -> str:
    return f"{accuracy(verdicts):.1%}" if verdicts else "-"


def accuracy_table(verdicts: list[Verdict], lengths: list[int]) -> str:
    """Returns Markdown: a row per question kind, a column per length."""
    head = ["question kind", *(f"{length} frames" for length in lengths)]
    rows = [head, ["---"] * len(head)]
    for kind in [*ONE_WORD_KINDS, None]:
        mine = [v for v in verdicts if kind in (None, v.question.kind)]
        cells = [_cell([v for v in mine if v.num_frames == length]) for length in lengths]
        rows.append([str(kind) if kind else "**all**", *cells])
    counts = [str(sum(v.num_frames == length for v in verdicts)) for length in lengths]
    rows.append(["questions", *counts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=embedded_model_path())
    parser.add_argument("--videos", type=int, default=100, help="videos per length")
    parser.add_argument("--frames", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--card", type=Path, help="model card to write the table into, between its two marks")
    parser.add_argument("--json", type=Path, help="file for every verdict, one object a line")
    options = parser.parse_args()
    pipeline = ColocatedPipeline.load(options.model, EngineConfig(num_threads=options.threads))
    verdicts: list[Verdict] = []
    for length in options.frames:
        began = time.monotonic()
        verdicts += evaluate(pipeline, length, options.videos)
        mine = [v for v in verdicts if v.num_frames == length]
        print(f"{length} frames: {accuracy(mine):.3f} of {len(mine)}", end=" ", file=sys.stderr)
        print(f"in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    table = accuracy_table(verdicts, options.frames)
    print(table)
    if options.card:
        write_into_card(options.card, table)
    if options.json:
        options.json.write_text("".join(json.dumps(_plain(verdict)) + "\n" for verdict in verdicts))


def _plain(verdict: Verdict) -> dict[str, object]:
    question = verdict.question
    return {
        "num_frames": verdict.num_frames,
        "seed": verdict.seed,
        "kind": str(question.kind),
        "question": question.text,
        "truth": question.answer,
        "answer": verdict.answer,
        "right": verdict.is_right,
    }


def write_into_card(card: Path, table: str, mark: str = "accuracy") -> None:
    """Replaces what is between `<!-- mark -->` and the next `<!-- end -->`."""
    begin, end = f"<!-- {mark} -->", "<!-- end -->"
    before, rest = card.read_text().split(begin)
    _, after = rest.split(end, maxsplit=1)
    card.write_text(f"{before}{begin}\n{table}\n{end}{after}")


if __name__ == "__main__":
    main()
