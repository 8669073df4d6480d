"""What the walls around media processes cost: CPU seconds of decoding behind them, and without.

    python -m benchmarks.video.walls [--repeats 12]

Each repeat decodes 64 frames of a drawn clip of 1280 x 720 twice, in a new process each, in changing order.
CPU time does not count what other programs take. The ratio is the median of the repeats' own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.video.video_decode import clip
from epd.video import open_file
from epd.video.children.server import prepare
from epd.video.children.walls import Walls
from epd.video.decoding.stream import stream
from epd.video.sources.source import FileDescriptor, Media

_NUM_FRAMES, _SIZE, _MINUTES = 64, (252, 448), 1


def decoded_s(path: Path, *, has_walls: bool) -> tuple[float, list[str]]:
    """Returns the CPU seconds of decoding in a new process, and the walls around it."""
    walls, file = Walls(), open_file(path, "the clip")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(
                write,
                json.dumps(_decoded(walls if has_walls else None, FileDescriptor(file.descriptor))).encode(),
            )
        finally:
            os._exit(0)  # nothing of the parent's may run here
    os.close(write)
    file.close()
    with open(read, "rb") as report:
        said: tuple[float, list[str]] = json.load(report)
    os.waitpid(pid, 0)
    return said


def _decoded(walls: Walls | None, source: FileDescriptor) -> tuple[float, tuple[str, ...]]:
    start_s = time.process_time()
    stand = () if walls is None else walls.enter()
    times_s = [(place + 0.5) * 60 * _MINUTES / _NUM_FRAMES for place in range(_NUM_FRAMES)]
    with stream(Media(source, "the clip"), times_s, _SIZE, group_sizes=(8,) * (_NUM_FRAMES // 8)) as groups:
        assert sum(1 for _ in groups) == _NUM_FRAMES // 8
    return time.process_time() - start_s, stand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=12)
    repeats = parser.parse_args().repeats
    prepare(decodes_video=True)
    ratios, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = clip("h264", "720p", _MINUTES, Path(folder))
        decoded_s(path, has_walls=False)
        for number in range(repeats):
            order = (True, False) if number % 2 else (False, True)
            took = {has_walls: decoded_s(path, has_walls=has_walls) for has_walls in order}
            ratios.append(took[True][0] / took[False][0])
            seconds.append(took[False][0])
            stand = took[True][1]
    print(f"walls: {', '.join(stand)}; without {statistics.median(seconds):.3f} s of CPU")
    median, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"ratio: median {median:.3f}, {least:.3f} to {most:.3f}, {repeats} repeats")


if __name__ == "__main__":
    main()
