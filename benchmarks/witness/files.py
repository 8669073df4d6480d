"""Changes files as trimming, recording and joining leave them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import av.error

from benchmarks.witness.clips import Clip, write


def trim(path: Path, clip: Clip) -> Clip:
    """Writes an edit list that shows the wanted runs of an MP4 with one track, whose index is at its end."""
    data = bytearray(path.read_bytes())
    boxes = dict(_boxes(data))
    movie, track = (_timescale(data, boxes[name]) for name in ("mvhd", "mdhd"))
    start = boxes["elst"]
    (number,) = struct.unpack_from(">I", data, start + 12)
    (begins,) = struct.unpack_from(">i", data, start + 20)
    if number != 1:
        raise ValueError(f"received {number} edits in {path}; allowed: 1; write the clip from 0 on")
    entries = b"".join(_edit(clip, run, movie, track, begins) for run in clip.shown)
    length = round(clip.duration_s * movie)
    struct.pack_into(">I", data, boxes["mvhd"] + 24, length)
    struct.pack_into(">I", data, boxes["tkhd"] + 28, length)
    struct.pack_into(">I", data, start + 12, len(clip.shown))
    data[start + 16 : start + 28] = entries
    for name in ("elst", "edts", "trak", "moov"):
        (size,) = struct.unpack_from(">I", data, boxes[name])
        struct.pack_into(">I", data, boxes[name], size + len(entries) - 12)
    path.write_bytes(data)
    return clip


def _edit(clip: Clip, run: tuple[int, int], movie: int, track: int, begins: int) -> bytes:
    """Returns an entry: its length in ticks of the movie, its begin in those of the track, its speed.

    The length is cut to whole ticks, or the frame behind it would be shown for the rest of one.
    """
    start_s, stop_s = (clip.stored_s[index] for index in run)
    return struct.pack(">IiI", int((stop_s - start_s) * movie), begins + round(start_s * track), 1 << 16)


def _boxes(data: bytearray, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, int]]:
    """Yields the names and places of boxes, and of those inside of them."""
    stop = len(data) if stop is None else stop
    while start + 8 <= stop:
        size, name = struct.unpack_from(">I4s", data, start)
        yield name.decode("latin-1"), start
        if name in (b"moov", b"trak", b"mdia", b"edts"):
            yield from _boxes(data, start + 8, start + size)
        start += max(size, 8)


def _timescale(data: bytearray, start: int) -> int:
    (scale,) = struct.unpack_from(">I", data, start + 20)
    return int(scale)


def cut_off(path: Path, clip: Clip) -> Clip:
    """Leaves the first two thirds of the bytes, as a crash does; what is shown is what can be decoded."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    return replace(clip, shown=((0, _num_decodable(path)),))


def _num_decodable(path: Path) -> int:
    """Counts the frames that come out whole before the packet that was cut through."""
    number = 0
    with av.open(str(path)) as container, suppress(av.error.InvalidDataError):
        for frame in container.decode(video=0):
            number += not frame.is_corrupt
    return number


def restart_at(clock_s: int) -> Callable[[Path, Clip], Clip]:
    """Returns what writes the second half by a clock that begins at `clock_s`, and joins both halves."""

    def finish(path: Path, clip: Clip) -> Clip:
        half, drawn = clip.num_frames // 2, clip.drawn_ms
        first = replace(clip, num_frames=half, finish=None)
        second = replace(clip, num_frames=clip.num_frames - half, start_s=Fraction(clock_s), finish=None)
        write(first, path, drawn[:half])
        part = path.with_suffix(".part")
        write(second, part, drawn[half:])
        path.write_bytes(path.read_bytes() + part.read_bytes())
        part.unlink()
        return clip

    return finish
