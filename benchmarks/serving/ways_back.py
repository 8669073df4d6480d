"""What the policy's choice costs beside each single way back to a video that was seen before, live.

    python -m benchmarks.serving.ways_back --minutes 1,10,60 --rounds 2 --write

One life asks about each video with an empty folder, which is then copied for each other one. A life has
nothing in memory, and a disk of a given speed. It asks about a short video that is kept and one that is not,
so that it has measured both, and then about each of the others:

    kv            keys and values are read, whatever that takes
    embeddings    embeddings are read, and prefilled
    media         frames are decoded and encoded, and prefilled
    choice        as `epd.control.way_back` says by what was measured

The results go to benchmarks/results/ways_back.{json,md} with --write.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
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
from epd.stages.encode.embedding_store import EmbeddingStore
from epd.stages.engine import kv_store
from epd.store.piece_files import PieceFiles
from epd.types import Tier
from epd.video.demo_video import write_demo_video

WAYS = ("kv", "embeddings", "media")
_SHORT_S = 60.0


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
            stack.enter_context(mock.patch.object(EmbeddingStore, "_is_read", reads))
        yield


def asked(service: OwnService, video: Path) -> tuple[float, str]:
    """The seconds of an answer of one word, and what was read for it."""
    conversation, start_s = OwnConversation(service, [video], max_tokens=1), time.monotonic()
    usage = conversation.ask("How many shapes are there?").usage
    seconds = time.monotonic() - start_s
    found = [f"{each.num} {each.kind}" for each in usage.reused if each.tier == "disk"]
    return seconds, ", ".join(found) or "nothing"


def life(kept: Path, speed: float, way: str, short: Sequence[Path], videos: Sequence[Path]) -> list[Row]:
    with TemporaryDirectory() as folder, paced(speed), forced(way):
        own = Path(shutil.copytree(kept, Path(folder, "kept")))
        with open_model(None, EngineConfig(cache_dir=own)) as service:
            for video in short:
                asked(service, video)
            answers = [asked(service, video) for video in videos]
    return [{"way": way, "seconds": seconds, "read": read} for seconds, read in answers]


def compared(minutes: float, speed: float, rounds: Sequence[dict[str, Row]]) -> Row:
    """A row of the table. The ratio is of medians."""
    seconds = {way: statistics.median(each[way]["seconds"] for each in rounds) for way in (*WAYS, "choice")}
    best = min(WAYS, key=lambda way: seconds[way])
    shown = {way: round(value, 3) for way, value in seconds.items()}
    return {
        "minutes": minutes,
        "disk, MB/s": speed / 1e6,
        **shown,
        "best way": best,
        "choice / best": round(seconds["choice"] / seconds[best], 3),
        "the choice read": rounds[-1]["choice"]["read"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", default="1,10,60")
    parser.add_argument("--megabytes-per-s", default="1000,20,2", help="of the disks")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/ways_back.*")
    given = parser.parse_args()
    lengths = [float(each) for each in given.minutes.split(",")]
    speeds = [float(each) * 1e6 for each in given.megabytes_per_s.split(",")]
    with TemporaryDirectory() as folder:
        lasting = [_SHORT_S, _SHORT_S, *(minutes * 60 for minutes in lengths)]
        paths = [Path(folder, f"{number}.mp4") for number in range(len(lasting))]
        for number, (path, seconds) in enumerate(zip(paths, lasting, strict=True)):
            write_demo_video(path, make_scene(number, seconds), fps=1, height=224, width=224)
        known, new, *videos = paths
        kept = Path(folder, "kept")
        with open_model(None, EngineConfig(cache_dir=kept)) as service:
            cold = [asked(service, video)[0] for video in (known, *videos)][1:]
        found: dict[tuple[int, float], list[dict[str, Row]]] = {}
        for number in range(given.rounds):
            for speed in speeds:
                ways = [*WAYS, "choice"] if number % 2 else ["choice", *WAYS]
                lives = {way: life(kept, speed, way, (known, new), videos) for way in ways}
                print(json.dumps({"disk, MB/s": speed / 1e6, **lives}), flush=True)
                for place in range(len(videos)):
                    row = {way: each[place] for way, each in lives.items()}
                    found.setdefault((place, speed), []).append(row)
    rows = [compared(lengths[place], speed, each) for (place, speed), each in sorted(found.items())]
    first = [
        {"minutes": each, "seconds": round(seconds, 2)} for each, seconds in zip(lengths, cold, strict=True)
    ]
    results = {"setting": setting(["torch"]), "ways": rows, "first": first}
    command = f"python -m benchmarks.serving.ways_back --minutes {given.minutes} --rounds {given.rounds}"
    title = "A second question, the embedded model; seconds, medians"
    text = markdown("The cheapest way back", command, results, {"ways": title, "first": "The first question"})
    print(text)
    if given.write:
        (RESULTS / "ways_back.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "ways_back.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
