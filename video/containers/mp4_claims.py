"""Counts the samples that the tables of an MP4 claim, before FFmpeg allocates an entry for each of them.

    moov > trak > mdia > hdlr            what the track holds: vide, soun, ...
                       > minf > stbl     stts, ctts: runs of samples; stsz, stz2: their number
    moof > traf > trun                   the number of samples in a fragment

A box of 24 bytes can claim four thousand million samples. Only headers and the tables of runs are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from epd.errors import CorruptMediaError
from video.sources.source import Media, Reader

_CONTAINERS = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"})
_RUNS = frozenset({b"stts", b"ctts"})
# Boxes that are read; a day in fragments of a second has more, and claims little in each.
_MAX_BOXES = 20_000
_MAX_TABLE_BYTES = 1 << 25
# Codecs of sound with less than a byte for each sample, which tables may count one by one.
_MAX_SOUND_SAMPLES_PER_BYTE = 64


@dataclass(slots=True)
class _Walk:
    """file: at any position. num_left: boxes that may still be read. handler: of the track being read."""

    file: Reader
    num_left: int = _MAX_BOXES
    handler: bytes = b""


def check_claims(media: Media) -> None:
    """Raises CorruptMediaError for an MP4 whose tables claim more samples than the file can hold."""
    head = media.head(8)
    if head[4:8] not in (b"ftyp", b"moov", b"moof", b"styp", b"mdat", b"free", b"wide", b"skip"):
        return
    with closing(media.reader()) as file:
        for claimed, is_sound in _claims(_Walk(file), 0, media.size_bytes):
            allowed = media.size_bytes * (_MAX_SOUND_SAMPLES_PER_BYTE if is_sound else 1)
            if claimed > allowed:
                raise CorruptMediaError(
                    f"{media.name} claims {claimed} samples in {media.size_bytes} bytes; allowed one for "
                    "each byte; copy or encode it again"
                )


def _claims(walk: _Walk, start: int, stop: int) -> Iterator[tuple[int, bool]]:
    """Yields (samples, whether of sound) for each table between two places of the file."""
    while start + 8 <= stop and walk.num_left > 0:
        walk.num_left -= 1
        name, body, end = _box(walk.file, start, stop)
        if name in _CONTAINERS:
            yield from _claims(walk, body, end)
        elif name == b"hdlr":
            walk.handler = _read(walk.file, body, 12)[8:12]
        elif name in _RUNS:
            yield _sum_of_runs(_read(walk.file, body, min(end - body, _MAX_TABLE_BYTES))), _is_sound(walk)
        elif name in (b"stsz", b"stz2"):
            yield _uint32(_read(walk.file, body + 8, 4)), _is_sound(walk)
        elif name == b"trun":
            yield _uint32(_read(walk.file, body + 4, 4)), False
        if end <= start:
            return
        start = end


def _is_sound(walk: _Walk) -> bool:
    return walk.handler == b"soun"


def _box(file: Reader, start: int, stop: int) -> tuple[bytes, int, int]:
    """Returns (name, start of the body, end) of a box, cut at the end of what holds it."""
    head = _read(file, start, 16)
    size, name, body = _uint32(head[:4]), head[4:8], start + 8
    if size == 1:
        size, body = int.from_bytes(head[8:16]), start + 16
    return name, body, min(stop, start + size) if size else stop


def _sum_of_runs(table: bytes) -> int:
    """Adds up the samples of runs (number, value), after version, flags and number of runs, 32 bits each."""
    num_runs = min(_uint32(table[4:8]), (len(table) - 8) // 8)
    runs = np.frombuffer(table, ">u4", count=2 * max(0, num_runs), offset=8 if num_runs > 0 else 0)
    return int(runs[::2].sum(dtype=np.uint64))


def _read(file: Reader, start: int, num_bytes: int) -> bytes:
    file.seek(start, os.SEEK_SET)
    return file.read(num_bytes)


def _uint32(data: bytes) -> int:
    return int.from_bytes(data[:4])
