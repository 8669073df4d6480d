"""Describes a video before a frame of it is decoded; each field's name says where its value comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

# Times closer than this are the same: it absorbs the rounding of float seconds, far below a frame interval.
TIME_TOLERANCE_S = 1e-6
# Codecs that reorder pictures and do not say so at the beginning of a packet.
_CODECS_OF_HIDDEN_ORDER = frozenset({"h264", "hevc", "vc1", "wmv3"})


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """One video stream, as its container describes it.

    width, height: pixels, after rotation.
    rotation_deg: clockwise turn that makes a decoded frame upright.
    start_pts: ticks of time_base at which the video starts; every time in seconds counts from there.
    keyframe_ticks_from_index: when each listed keyframe is decoded (MP4, AVI) or shown (MKV), in ticks of
        time_base; None without a complete index, as in TS and fragmented MP4.
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

    @property
    def keyframe_times_s_from_index(self) -> tuple[float, ...] | None:
        """The listed keyframes, seconds from the start of the video; None without a complete index."""
        ticks = self.keyframe_ticks_from_index
        return None if ticks is None else tuple(self.seconds(tick) for tick in ticks)

    @property
    def is_without_pts(self) -> bool:
        """Whether the container only numbers packets as they are stored: see `avi_times.py`."""
        return self.container_format == "avi"

    @property
    def is_ordered_by_decoding(self) -> bool:
        """Whether only decoding shows in which order frames come on screen."""
        return self.is_without_pts and self.codec in _CODECS_OF_HIDDEN_ORDER

    @property
    def duration_s(self) -> float:
        """Best known duration from the start of the video, seconds; 0 when the container says nothing."""
        if self.duration_s_from_stream:
            return self.duration_s_from_stream
        counts_from_zero = "matroska" in self.container_format  # and not from the first frame
        start_s = float(self.start_pts * self.time_base) if counts_from_zero else 0.0
        return max(0.0, (self.duration_s_from_container or 0.0) - start_s)

    @property
    def fps(self) -> float:
        """Best known average rate, frames per second; 0 when no rate is known."""
        return float(self.average_fps_from_header or self.nominal_fps_guessed or 0.0)

    @property
    def num_frames(self) -> int:
        """Best known number of frames: the header's, else duration times rate."""
        return self.num_frames_from_header or round(self.duration_s * self.fps)

    def seconds(self, pts: int) -> float:
        """Returns the time of a timestamp, seconds from the start of the video."""
        return float((pts - self.start_pts) * self.time_base)

    def pts_at(self, time_s: float) -> int:
        """Returns the last timestamp at or before a time; the frame on screen is the last with pts <= it."""
        return self.start_pts + math.floor((time_s + TIME_TOLERANCE_S) / self.time_base)
