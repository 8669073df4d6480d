"""Describes a video before a frame of it is decoded; each field's name says where its value comes from."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

# Times closer than this are the same: it absorbs the rounding of float seconds, far below a frame interval.
TIME_TOLERANCE_S = 1e-6
# Codecs that reorder pictures and do not say so at the beginning of a packet.
_CODECS_OF_HIDDEN_ORDER = frozenset({"h264", "hevc", "vc1", "wmv3"})
# Streams of pictures and nothing else.
RAW_FORMATS = frozenset({"h264", "hevc", "m4v", "mpegvideo", "mjpeg", "obu"})
# Containers of which FFmpeg gives times of decoding and guesses the others.
_FORMATS_OF_DECODE_TIMES = frozenset({"asf"})
# Containers that are sought in by an index, so that a packet's time may not depend on those before it.
_INDEXED_FORMATS = ("mov", "matroska")
# Frames by which a header's rate may disagree with what was counted: the last one's time is often unknown.
_FRAMES_OF_DOUBT = 1.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What the packets of a video say of it.

    num_frames: that are shown; None if they were not counted.
    end_pts: when the last one leaves the screen, ticks of the video's time_base.
    """

    num_frames: int | None
    end_pts: int


@dataclass(frozen=True, slots=True)
class EditPart:
    """A part of the media that an edit list shows.

    begin_s, end_s: when it is on screen, seconds from the first picture on.
    start_pts, stop_pts: what is shown of the media, ticks; of a still one tick.
    """

    begin_s: Fraction
    end_s: Fraction
    start_pts: int
    stop_pts: int


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """One video stream, as its container describes it.

    width, height: pixels, after rotation.
    rotation_deg: clockwise turn that makes a decoded frame upright.
    start_pts: ticks of time_base at which the video starts; every time in seconds counts from there.
    keyframe_ticks_from_index: when each listed keyframe is decoded (MP4, AVI) or shown (MKV), in ticks of
        time_base; None without a complete index, as in TS and fragmented MP4.
    is_fragmented: whether an MP4 lists its samples in fragments.
    parts: of the media that an edit list shows, by their time on screen; empty where it shows one, whose
        times are those of packets. Between two of them the last frame of the first one stays.
    shown: as measured; None if only the container's claims are known.
    """

    codec: str
    width: int
    height: int
    rotation_deg: int
    time_base: Fraction
    start_pts: int
    duration_s_from_stream: float | None
    duration_s_from_container: float | None
    average_fps_from_header: Fraction | None
    nominal_fps_guessed: Fraction | None
    num_frames_from_header: int | None
    keyframe_ticks_from_index: tuple[int, ...] | None
    container_format: str
    pixel_format: str | None
    is_fragmented: bool = False
    parts: tuple[EditPart, ...] = ()
    shown: Shown | None = None

    @property
    def is_without_pts(self) -> bool:
        """Whether packets do not say when they are shown: see `avi_times.py`."""
        return self.is_numbered or self.container_format in _FORMATS_OF_DECODE_TIMES

    @property
    def is_numbered(self) -> bool:
        """Whether packets are only numbered as they are stored."""
        return self.container_format == "avi" or self.is_raw

    @property
    def is_raw(self) -> bool:
        """Whether there is no container, so that every picture is shown for one tick."""
        return self.container_format in RAW_FORMATS

    @property
    def may_jump(self) -> bool:
        """Whether the clock may start again or leap: see `steady_clock.py`."""
        has_index = any(name in self.container_format for name in _INDEXED_FORMATS)
        return not has_index and not self.is_numbered

    @property
    def has_hidden_order(self) -> bool:
        """Whether only decoding shows in which order packets come on screen."""
        return self.is_without_pts and self.codec in _CODECS_OF_HIDDEN_ORDER

    @property
    def duration_s(self) -> float:
        """Duration from the start of the video, seconds: measured, else claimed; 0 when it is not known."""
        if self.parts:
            return float(self.parts[-1].end_s)
        if self.shown is not None:
            return max(0.0, self.seconds(self.shown.end_pts))
        if self.duration_s_from_stream:
            return self.duration_s_from_stream
        counts_from_zero = "matroska" in self.container_format  # and not from the first frame
        start_s = float(self.start_pts * self.time_base) if counts_from_zero else 0.0
        return max(0.0, (self.duration_s_from_container or 0.0) - start_s)

    @property
    def fps(self) -> float:
        """Average rate, frames per second: the header's unless the frames that were counted disagree.

        0 when no rate is known.
        """
        rate = float(self.average_fps_from_header or self.nominal_fps_guessed or 0.0)
        counted = None if self.shown is None else self.shown.num_frames
        if not counted or not self.duration_s or abs(self.duration_s * rate - counted) <= _FRAMES_OF_DOUBT:
            return rate
        return counted / self.duration_s

    @property
    def num_frames(self) -> int:
        """Number of frames: counted, else measured or claimed duration times rate."""
        if self.shown is None:
            return self.num_frames_from_header or round(self.duration_s * self.fps)
        counted = self.shown.num_frames
        return max(1, round(self.duration_s * self.fps)) if counted is None else counted

    def seconds(self, pts: int) -> float:
        """Returns the time of a timestamp, seconds from the start of the video.

        Of what an edit list shows more than once, the first time; of what it hides, when the next is shown.
        """
        if self.parts:
            return float(self._time_in_parts(pts))
        return float((pts - self.start_pts) * self.time_base)

    def _time_in_parts(self, pts: int) -> Fraction:
        for part in self.parts:
            if part.start_pts <= pts < part.stop_pts:
                return part.begin_s + (pts - part.start_pts) * self.time_base
        later = min(
            (part for part in self.parts if part.start_pts > pts),
            key=lambda part: part.start_pts,
            default=None,
        )
        return self.parts[-1].end_s if later is None else later.begin_s

    def pts_at(self, time_s: float) -> int:
        """Returns the last timestamp at or before a time; the frame on screen is the last with pts <= it."""
        if not self.parts:
            return self.start_pts + math.floor((time_s + TIME_TOLERANCE_S) / self.time_base)
        place = bisect_right(self.parts, time_s + TIME_TOLERANCE_S, key=lambda part: float(part.begin_s))
        part = self.parts[max(0, place - 1)]
        pts = part.start_pts + math.floor((time_s + TIME_TOLERANCE_S - float(part.begin_s)) / self.time_base)
        return min(max(part.start_pts, pts), part.stop_pts - 1)
