"""Reads what an MP4 shows of a track: the parts of its media, and whether it has fragments.

FFmpeg applies one edit well. Of several it moves the later ones to keyframes, and it shows what is in a gap,
so such a file is opened without its edits, and `VideoInfo.parts` says which time of the media is on screen.

moov > mvhd                        ticks a second of the movie
     > mvex                        there are fragments
     > trak > tkhd                 the number of the track
            > edts > elst          edits: (duration in the movie, first media time, or -1: shows nothing,
                                      rate: 0 for a still)

edits       | a: 5 s from 2 s | -1: 3 s | b: 4 s from 20 s |      ISO/IEC 14496-12, 8.6.6
shown         2.0 ... 7.0       nothing   20.0 ... 24.0           two parts, with a gap from 5 to 8 s
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction

from epd.video.containers.info import EditPart
from epd.video.containers.mp4_boxes import BoxWalk, has_boxes, uint32
from epd.video.sources.source import Media, OpenVideo, open_video

# Edits that are read of a track: an editor's cuts of a long film are fewer.
_MAX_EDITS = 10_000
_NOTHING = -1

# Duration in ticks of the movie, first media time in ticks of the track, whether it is a still.
Edit = tuple[int, int, bool]


@dataclass(frozen=True, slots=True)
class Mp4Layout:
    """Describes the edits of one track.

    is_fragmented: samples are listed in fragments, of which FFmpeg knows those that it has read.
    edits: of a track that shows more than one part of its media, or a still; else empty.
    ticks_per_s: of the movie.
    """

    is_fragmented: bool = False
    edits: tuple[Edit, ...] = ()
    ticks_per_s: int = 1

    def parts(self, time_base: Fraction) -> tuple[EditPart, ...]:
        """Returns what the edits show. time_base: of the track, seconds a tick."""
        parts, at = list[EditPart](), 0
        for duration, media_time, is_still in self.edits:
            begin_s, at = Fraction(at, self.ticks_per_s), at + duration
            end_s = Fraction(at, self.ticks_per_s)
            num_ticks = 1 if is_still else max(1, math.ceil((end_s - begin_s) / time_base))
            if media_time != _NOTHING:
                parts.append(EditPart(begin_s, end_s, media_time, media_time + num_ticks))
        return tuple(parts)


def open_as_shown(media: Media, open_timeout_s: float) -> OpenVideo:
    """Opens a video; one whose edits `read_layout` lists without them. Raises as `open_video`."""
    video = open_video(media, open_timeout_s=open_timeout_s)
    if not read_layout(media, video.stream.id).edits:
        return video
    video.close()
    return open_video(media, open_timeout_s=open_timeout_s, ignores_edits=True)


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
    return Mp4Layout(is_fragmented, _worth_applying(edits), timescale)


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
            not any(table[place + 2 * width : place + row]),
        )
        for place in places
    ]


def _worth_applying(edits: list[Edit]) -> tuple[Edit, ...]:
    """Returns the edits from the first that shows a picture to the last; none where FFmpeg applies them well.

    One without a length, as fragments have it, shows the media to its end.
    """
    shows = [place for place, edit in enumerate(edits) if edit[1] >= 0 and edit[0]]
    if any(not duration for duration, _, _ in edits) or not shows:
        return ()
    is_plain = len(shows) == 1 and not edits[shows[0]][2]
    return () if is_plain else tuple(edits[shows[0] : shows[-1] + 1])
