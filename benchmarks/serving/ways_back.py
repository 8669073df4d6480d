"""What the policy's choice costs beside each single way back to a video that was seen before, live.

    python -m benchmarks.serving.ways_back --minutes 1,10,60 --rounds 3 --write

One life asks about each video with an empty folder, which is then copied for each other one. A life has
nothing in memory, and a disk of a given speed. It asks about short videos that are kept and ones that are
not, so that all is warm, and both were measured. Then it asks about several others of each length, once each:

    kv            keys and values are read, whatever that takes
    embeddings    embeddings are read, and prefilled
    media         frames are decoded and encoded, and prefilled
    choice        as `epd.control.way_back` says by what was measured

The results go to benchmarks/results/ways_back.{json,md} with --write.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from benchmarks.reporting import RESULTS, Row, markdown, setting
from epd.control.way_back import PartCosts, WayBack
from epd.engine_config import EngineConfig
from epd.serve_app.cli.own_model import OwnConversation, open_model
from epd.serve_app.local.own_service import OwnService
from epd.shapes import make_scene
from epd.stages.encode.embedding_store import KeptUnits
from epd.stages.engine import kv_store
from epd.store.piece_files import PieceFiles
from epd.types import Tier
from epd.video.demo_video import write_demo_video

WAYS = ("kv", "embeddings", "media")
Life = dict[float, Row]  # by minutes

_SHORT_S = 60.0
# Short videos that are kept, and as many that are not.
_NUM_WARM = 2
# Videos of as many minutes at most: the shorter, the more an answer's seconds differ.
_NUM_VIDEOS = {1.0: 9, 10.0: 5, math.inf: 3}


@contextmanager
def paced(bytes_per_s: float) -> Iterator[None]:
    """Lets a disk read one piece after another, at a speed."""
    read, disk = PieceFiles.read, threading.Lock()

    def slow(files: PieceFiles, key: str, index: int, payload: memoryview) -> Tier | None:
        with disk:
            tier = read(files, key, index, payload)
            time.sleep(0 if tier is None else len(payload) / bytes_per_s)
        return tier

    with mock.patch.object(PieceFiles, "read", slow):
        yield


@contextmanager
def forced(way: str) -> Iterator[None]:
    """Closes the other ways; of "choice", none."""

    def all_or_none(parts: Sequence[PartCosts]) -> WayBack:
        return WayBack(len(parts) if way == "kv" else 0, (), 0.0)

    with ExitStack() as stack:
        if way != "choice":
            stack.enter_context(mock.patch.object(kv_store, "cheapest", all_or_none))
            reads = staticmethod(lambda *_: way == "embeddings")
            stack.enter_context(mock.patch.object(KeptUnits, "_is_read", reads))
        yield


def asked(service: OwnService, video: Path) -> tuple[float, str]:
    """The seconds of an answer of one word, and what was read for it."""
    conversation, start_s = OwnConversation(service, [video], max_tokens=1), time.monotonic()
    usage = conversation.ask("How many shapes are there?").usage
    seconds = time.monotonic() - start_s
    found = [f"{each.num} {each.kind}" for each in usage.reused if each.tier == "disk"]
    return seconds, ", ".join(found) or "nothing"


def life(
    kept: Path, speed: float, way: str, warm: Sequence[Path], lengths: Mapping[float, list[Path]]
) -> Life:
    """Returns by length the median of the seconds of a video, and what was read for the last one."""
    with TemporaryDirectory() as folder, paced(speed), forced(way):
        own = Path(shutil.copytree(kept, Path(folder, "kept")))
        os.sync()
        with open_model(None, EngineConfig(cache_dir=own)) as service:
            for video in warm:
                asked(service, video)
            answers = {each: [asked(service, video) for video in videos] for each, videos in lengths.items()}
    return {each: _of_several(found) for each, found in answers.items()}


def _of_several(answers: Sequence[tuple[float, str]]) -> Row:
    seconds = [round(each, 4) for each, _ in answers]
    return {"seconds": statistics.median(seconds), "each": seconds, "read": answers[-1][1]}


def compared(minutes: float, speed: float, rounds: Sequence[dict[str, Row]]) -> Row:
    """A row of the table. The ratio is the median of those of the rounds, each to its best way."""
    seconds = {way: statistics.median(each[way]["seconds"] for each in rounds) for way in (*WAYS, "choice")}
    best = min(WAYS, key=lambda way: seconds[way])
    ratios = [each["choice"]["seconds"] / each[best]["seconds"] for each in rounds]
    shown = {way: round(value, 3) for way, value in seconds.items()}
    return {
        "minutes": minutes,
        "disk, MB/s": speed / 1e6,
        **shown,
        "best way": best,
        "choice / best": round(statistics.median(ratios), 3),
        "of the rounds": ", ".join(f"{each:.3f}" for each in sorted(ratios)),
        "the choice read": rounds[-1]["choice"]["read"],
    }


def num_videos(minutes: float) -> int:
    return next(num for most, num in _NUM_VIDEOS.items() if minutes <= most)


def made(folder: Path, name: str, seconds: float, num: int) -> list[Path]:
    """Returns videos that differ from each other, and from those of other names."""
    paths = [folder / f"{name} {number}.mp4" for number in range(num)]
    for path in paths:
        seed = zlib.crc32(path.name.encode())
        write_demo_video(path, make_scene(seed, seconds), fps=1, height=224, width=224)
    return paths


def first_lives(kept: Path, known: Sequence[Path], lengths: Mapping[float, list[Path]]) -> list[Row]:
    """Asks about all videos that are to be kept. Returns the median seconds of an answer, by minutes."""
    with open_model(None, EngineConfig(cache_dir=kept)) as service:
        for video in known:
            asked(service, video)
        seconds = {each: [asked(service, video)[0] for video in videos] for each, videos in lengths.items()}
    return [{"minutes": each, "seconds": round(statistics.median(s), 3)} for each, s in seconds.items()]


def measured(folder: Path, lengths: Mapping[float, list[Path]], speeds: Sequence[float], rounds: int) -> Row:
    """Returns the table of all ways, and that of the first questions."""
    known, new = (made(folder, f"warm{number}", _SHORT_S, _NUM_WARM) for number in range(2))
    first = first_lives(folder / "kept", known, lengths)
    found: dict[tuple[float, float], list[dict[str, Row]]] = {}
    for number, speed in itertools.product(range(rounds), speeds):
        turn = number % (1 + len(WAYS))  # no way is always the first
        ways = [*WAYS, "choice"][turn:] + [*WAYS, "choice"][:turn]
        lives = {way: life(folder / "kept", speed, way, [*known, *new], lengths) for way in ways}
        print(json.dumps({"disk, MB/s": speed / 1e6, **lives}), flush=True)
        for minutes in lengths:
            row = {way: each[minutes] for way, each in lives.items()}
            found.setdefault((minutes, speed), []).append(row)
    rows = [compared(minutes, speed, each) for (minutes, speed), each in sorted(found.items())]
    return {"setting": setting(["torch"]), "ways": rows, "first": first}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", default="1,10,60")
    parser.add_argument("--megabytes-per-s", default="1000,20,2", help="of the disks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/ways_back.*")
    given = parser.parse_args()
    speeds = [float(each) * 1e6 for each in given.megabytes_per_s.split(",")]
    with TemporaryDirectory() as folder:
        lengths = {
            minutes: made(Path(folder), f"{minutes:g}", minutes * 60, num_videos(minutes))
            for minutes in map(float, given.minutes.split(","))
        }
        results = measured(Path(folder), lengths, speeds, given.rounds)
    command = f"python -m benchmarks.serving.ways_back --minutes {given.minutes} --rounds {given.rounds}"
    title = "A second question, the embedded model; seconds, medians"
    text = markdown("The cheapest way back", command, results, {"ways": title, "first": "The first question"})
    print(text)
    if given.write:
        (RESULTS / "ways_back.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "ways_back.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
