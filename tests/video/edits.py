"""Edit lists of MP4s, as editors and phones write them, put into files that have others."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

Edit = tuple[
    int, int
]  # duration in ticks of the movie, first media time in ticks of the track; -1: nothing is shown


def with_edits(data: bytes, edits: Sequence[Edit]) -> bytes:
    """An MP4 whose first track has these edits instead of its own. Its `moov` must come last."""
    boxes = list(_boxes(data, 0, len(data)))
    assert boxes[-1][0] == b"moov"
    at, end = boxes[-1][1:]
    moov = _box(b"moov", b"".join(_track_or(data, box, edits) for box in _boxes(data, at + 8, end)))
    return data[:at] + moov


def timescales(data: bytes) -> tuple[int, int]:
    """Ticks a second of the movie and of the media of its first track."""
    movie, media = data.index(b"mvhd"), data.index(b"mdhd")
    return struct.unpack_from(">I", data, movie + 16)[0], struct.unpack_from(">I", data, media + 16)[0]


def _track_or(data: bytes, box: tuple[bytes, int, int], edits: Sequence[Edit]) -> bytes:
    name, at, end = box
    if name != b"trak" or b"vide" not in data[at:end]:
        return data[at:end]
    kept = [data[a:e] for inner, a, e in _boxes(data, at + 8, end) if inner != b"edts"]
    rows = b"".join(struct.pack(">IihH", duration, start, 1, 0) for duration, start in edits)
    elst = _box(b"elst", struct.pack(">II", 0, len(edits)) + rows)
    return _box(b"trak", kept[0] + _box(b"edts", elst) + b"".join(kept[1:]))


def _boxes(data: bytes, at: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    while at < stop:
        size = struct.unpack_from(">I", data, at)[0]
        yield data[at + 4 : at + 8], at, at + size
        at += size


def _box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body) + 8) + name + body
