"""Counts the samples that the tables of an MP4 claim, before FFmpeg allocates an entry for each of them.

    moov > trak > mdia > hdlr            what the track holds: vide, soun, ...
                       > minf > stbl     stts, ctts: runs of samples; stsz, stz2: their number
    moof > traf > trun                   the number of samples in a fragment

A box of 24 bytes can claim four thousand million samples. Only headers and the tables of runs are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from epd.errors import CorruptMediaError
from epd.video.containers.mp4_boxes import BoxWalk, has_boxes, uint32
from epd.video.sources.source import Media

_CONTAINERS = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"})
_RUNS = frozenset({b"stts", b"ctts"})
_MAX_TABLE_BYTES = 1 << 25
# Codecs of sound with less than a byte for each sample, which tables may count one by one.
_MAX_SOUND_SAMPLES_PER_BYTE = 64


@dataclass(slots=True)
class _Walk(BoxWalk):
    """handler: of the track being read."""

    handler: bytes = b""


def check_claims(media: Media) -> None:
    """Raises CorruptMediaError for an MP4 whose tables claim more samples than the file can hold."""
    if not has_boxes(media):
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
    for name, body, end in walk.boxes(start, stop):
        if name in _CONTAINERS:
            yield from _claims(walk, body, end)
        elif name == b"hdlr":
            walk.handler = walk.read(body, 12)[8:12]
        elif name in _RUNS:
            yield _sum_of_runs(walk.read(body, min(end - body, _MAX_TABLE_BYTES))), _is_sound(walk)
        elif name in (b"stsz", b"stz2"):
            yield uint32(walk.read(body + 8, 4)), _is_sound(walk)
        elif name == b"trun":
            yield uint32(walk.read(body + 4, 4)), False


def _is_sound(walk: _Walk) -> bool:
    return walk.handler == b"soun"


def _sum_of_runs(table: bytes) -> int:
    """Adds up the samples of runs (number, value), after version, flags and number of runs, 32 bits each."""
    num_runs = min(uint32(table[4:8]), (len(table) - 8) // 8)
    runs = np.frombuffer(table, ">u4", count=2 * max(0, num_runs), offset=8 if num_runs > 0 else 0)
    return int(runs[::2].sum(dtype=np.uint64))
