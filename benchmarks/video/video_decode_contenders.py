"""Ways to get sampled frames out of a video, each as a generator of uint8 [n, H, W, 3] RGB batches.

Ours, the sequential loop, an imitation of QuickCodec's interval scheme, and the other libraries where they
are installed. All give the frames on screen at the wanted times, resized exactly as the models' processors
resize (the others by the same torchvision call, made for each frame on its fast path), and hold few at once.
"""

from __future__ import annotations

import importlib.util
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np

from epd import video
from epd.machine import usable_cpus
from epd.video.decoding.pixels import exact_resize

BATCH = 8
SIZE = (252, 448)  # what a vision model gets of a 16:9 video
Batches = Iterator[np.ndarray]
HOW_TO_INSTALL = {
    "torchcodec": "pip install torchcodec, and FFmpeg's shared libraries on LD_LIBRARY_PATH",
    "decord": "pip install eva-decord",
    "cv2": "pip install opencv-python-headless",
}


@dataclass(frozen=True)
class Contender:
    """name, how many cores it may use, and the function (path, times in seconds) -> batches."""

    name: str
    cores: int
    decode: Callable[[Path, list[float]], Batches]

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")


def ours(workers: int) -> Callable[[Path, list[float]], Batches]:
    def decode(path: Path, times_s: list[float]) -> Batches:
        with video.stream(path, times_s, SIZE, workers=workers, group_size=BATCH) as groups:
            for group in groups:
                yield group.frames.data

    return decode


def resized(batch: np.ndarray) -> np.ndarray:
    """uint8 [n, *SIZE, 3] of uint8 [n, H, W, 3]."""
    out = np.empty((len(batch), *SIZE, 3), np.uint8)
    for row, frame in zip(out, batch, strict=True):
        row[:] = exact_resize(frame, SIZE)
    return out


def sequential(path: Path, times_s: list[float]) -> Batches:
    """The plain loop: decode everything up to the last wanted frame, convert the wanted ones."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        yield from _on_screen(container.decode(stream), stream, times_s)


def _on_screen(frames: Iterator[av.VideoFrame], stream: Any, times_s: list[float]) -> Batches:
    start = stream.start_time or 0
    wanted = [start + int((time_s + 1e-6) / stream.time_base) for time_s in times_s]
    before = None
    place = 0
    for frame in frames:
        while place < len(wanted) and frame.pts > wanted[place]:
            yield resized((before or frame).to_ndarray(format="rgb24", threads=1)[None])
            place += 1
        if place == len(wanted):
            return
        before = frame
    for _ in wanted[place:]:
        yield resized(before.to_ndarray(format="rgb24", threads=1)[None])


def interval_scheme(cores: int) -> Callable[[Path, list[float]], Batches]:
    """QuickCodec's idea: equal intervals snapped to keyframes, one decoder each, every frame decoded.

    It is given what it needs for free: keyframes from the index, and only the span that holds wanted times.
    """

    def decode(path: Path, times_s: list[float]) -> Batches:
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            base, start = float(stream.time_base), stream.start_time or 0
            keys = [(e.timestamp - start) * base for e in stream.index_entries if e.is_keyframe]
        first, last = times_s[0], times_s[-1]
        cuts = [first + (last - first) * i / cores for i in range(1, cores)]
        snapped = sorted({keys[max(0, bisect_right(keys, cut) - 1)] for cut in cuts})
        bounds = [first, *[cut for cut in snapped if cut > first], last + 1]
        parts = [[t for t in times_s if a <= t < b] for a, b in pairwise(bounds)]
        results: list[list[np.ndarray]] = [[] for _ in parts]

        def work(index: int) -> None:
            with av.open(str(path)) as container:
                stream = container.streams.video[0]
                stream.thread_type = "NONE"
                container.seek(start + int(parts[index][0] / stream.time_base), stream=stream)
                results[index] = list(_on_screen(container.decode(stream), stream, parts[index]))

        threads = [threading.Thread(target=work, args=(i,)) for i, part in enumerate(parts) if part]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            yield from result

    return decode


def torchcodec(cores: int, mode: str) -> Callable[[Path, list[float]], Batches]:
    def decode(path: Path, times_s: list[float]) -> Batches:
        from torchcodec.decoders import VideoDecoder

        decoder = VideoDecoder(str(path), num_ffmpeg_threads=cores, dimension_order="NHWC", seek_mode=mode)
        for i in range(0, len(times_s), BATCH):
            yield resized(decoder.get_frames_played_at(times_s[i : i + BATCH]).data.numpy())

    return decode


def decord(cores: int) -> Callable[[Path, list[float]], Batches]:
    def decode(path: Path, times_s: list[float]) -> Batches:
        import decord as library

        reader = library.VideoReader(str(path), num_threads=cores)
        fps = reader.get_avg_fps()
        places = [min(len(reader) - 1, int(time_s * fps + 1e-4)) for time_s in times_s]
        for i in range(0, len(places), BATCH):
            yield resized(reader.get_batch(places[i : i + BATCH]).asnumpy())

    return decode


def opencv(path: Path, times_s: list[float]) -> Batches:
    """Grabs frame after frame for dense times, seeks for sparse ones, as its users do."""
    import cv2

    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    fps = capture.get(cv2.CAP_PROP_FPS)
    is_sparse = len(times_s) > 1 and times_s[1] - times_s[0] >= 4
    position = -1
    for place in (int(time_s * fps + 1e-4) for time_s in times_s):
        if is_sparse:
            capture.set(cv2.CAP_PROP_POS_FRAMES, place)
            position = place - 1
        while position < place:
            capture.grab()
            position += 1
        yield resized(cv2.cvtColor(capture.retrieve()[1], cv2.COLOR_BGR2RGB)[None])
    capture.release()


def missing_libraries() -> dict[str, str]:
    """Comparators that are not installed, and how to install them."""
    return {name: how for name, how in HOW_TO_INSTALL.items() if importlib.util.find_spec(name) is None}


def contenders() -> list[Contender]:
    """Everyone who is here, ours first."""
    cores = min(2, usable_cpus())
    several = range(1, cores + 1)
    found = [Contender(f"ours-{n}", n, ours(n)) for n in several]
    found.append(Contender("sequential", 1, sequential))
    found += [Contender(f"intervals-{n}", n, interval_scheme(n)) for n in several]
    missing = missing_libraries()
    if "torchcodec" not in missing:
        found.append(Contender("torchcodec-exact-1", 1, torchcodec(1, "exact")))
        found += [Contender(f"torchcodec-approx-{n}", n, torchcodec(n, "approximate")) for n in several]
    if "decord" not in missing:
        found += [Contender(f"decord-{n}", n, decord(n)) for n in several]
    if "cv2" not in missing:
        found.append(Contender("opencv-1", 1, opencv))
    return found
