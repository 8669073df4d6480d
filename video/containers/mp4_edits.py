"""Reads what an MP4 shows of a track, where FFmpeg does not say: splices, gaps, and whether it has fragments.

moov > mvhd                        ticks a second of the movie
     > mvex                        there are fragments
     > trak > tkhd                 the number of the track
            > edts > elst          edits: (duration in the movie, first media time, or -1: shows nothing)

edits       | a: 5 s from 2 s | -1: 3 s | b: 4 s from 20 s |      ISO/IEC 14496-12, 8.6.6
shown         2.0 ... 7.0       nothing   20.0 ... 24.0           spliced, with a gap from 5 to 8 s
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction

from epd.video.containers.mp4_boxes import BoxWalk, has_boxes, uint32
from epd.video.sources.source import Media

# Edits that are read of a track: an editor's cuts of a long film are fewer.
_MAX_EDITS = 10_000
_NOTHING = -1

Edit = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mp4Layout:
    """Describes the edits of one track.

    is_fragmented: samples are listed in fragments, of which FFmpeg knows those that it has read.
    is_spliced: several parts of the media are shown, so that times in the file may go back.
    gaps_s: half-open spans after the first picture in which nothing new is shown, seconds of the movie.
    """

    is_fragmented: bool = False
    is_spliced: bool = False
    gaps_s: tuple[tuple[Fraction, Fraction], ...] = ()


def read_layout(media: Media, track_id: int) -> Mp4Layout:
    """Returns the layout of a track of a medium; of one that is no MP4, the default."""
    if not has_boxes(media):
        return Mp4Layout()
    with closing(media.reader()) as file:
        walk = BoxWalk(file)
        for name, body, end in walk.boxes(0, media.size_bytes):
            if name == b"moov":
                return _layout(walk, body, end, track_id)
    return Mp4Layout()


def _layout(walk: BoxWalk, start: int, stop: int, track_id: int) -> Mp4Layout:
    """Reads the `moov` box between two places."""
    timescale, is_fragmented, edits = 1, False, list[Edit]()
    for name, body, end in walk.boxes(start, stop):
        if name == b"mvhd":
            timescale = uint32(walk.read(body + (20 if walk.read(body, 1) == b"\1" else 12), 4)) or 1
        elif name == b"mvex":
            is_fragmented = True
        elif name == b"trak":
            edits = _track_edits(walk, body, end, track_id) or edits
    return Mp4Layout(
        is_fragmented, sum(media_time >= 0 for _, media_time in edits) > 1, _gaps_s(edits, timescale)
    )


def _track_edits(walk: BoxWalk, start: int, stop: int, track_id: int) -> list[Edit]:
    """Reads the edits of a `trak` box, none of another track."""
    edits = list[Edit]()
    for name, body, end in walk.boxes(start, stop):
        if name == b"tkhd":
            number = uint32(walk.read(body + (20 if walk.read(body, 1) == b"\1" else 12), 4))
            if number != track_id:
                return []
        elif name == b"edts":
            for inner, place, inner_end in walk.boxes(body, end):
                edits = _edits(walk.read(place, inner_end - place)) if inner == b"elst" else edits
    return edits


def _edits(table: bytes) -> list[Edit]:
    """Reads version, flags, their number, and of each edit duration, media time and rate."""
    width = 8 if table[:1] == b"\1" else 4
    row = 2 * width + 4
    number = min(uint32(table[4:8]), (len(table) - 8) // row, _MAX_EDITS)
    places = [8 + row * index for index in range(number)]
    return [
        (
            int.from_bytes(table[place : place + width]),
            int.from_bytes(table[place + width : place + 2 * width], signed=True),
        )
        for place in places
    ]


def _gaps_s(edits: list[Edit], timescale: int) -> tuple[tuple[Fraction, Fraction], ...]:
    """Returns the empty edits between others."""
    gaps, at, has_begun = [], 0, False
    for duration, media_time in edits:
        if media_time == _NOTHING and has_begun:
            gaps.append((Fraction(at, timescale), Fraction(at + duration, timescale)))
        has_begun |= media_time != _NOTHING
        at += duration
    return tuple(gaps)
