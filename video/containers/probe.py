"""Describes a video from its container, decoding one frame at most, for its rotation.

What is shown is measured from packets; nothing is decoded for that. A header's length may be that of another
track, of what an edit list hides, or of what was cut off.

    MP4, MOV    the index, with its edits, tells which frames are shown; the last GOP, when the last one ends
    AVI         the index numbers the frames
    MKV, WebM   files up to 64 MiB are read; of larger ones the last GOP, if the header's rate holds there
    others      are read: TS, FLV, fragments, raw streams, and what has no index
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

import av.error
from av.index import IndexEntries
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from epd.errors import CorruptMediaError
from epd.video.containers.avi_times import timed
from epd.video.containers.decoder_memory import check_memory
from epd.video.containers.info import RAW_FORMATS, EditPart, Shown, VideoInfo
from epd.video.containers.limits import DEFAULT_LIMITS, Limits, check_length, check_size
from epd.video.containers.mp4_edits import open_as_shown, read_layout
from epd.video.containers.orientation import display_matrix
from epd.video.containers.steady_clock import SteadyClock
from epd.video.sources.source import Media, OpenVideo, Source, VideoPacket, as_media, open_video

# Reading so much costs less than what could be wrong without it.
_SMALL_BYTES = 64 << 20
_MAX_READ_ERRORS = 16
_PACKETS_BETWEEN_LOOKS = 1024  # at the time
# The last frames' rate may differ so much from the header's, as a fraction of it.
_MAX_RATE_ERROR = 0.1
_MIN_FRAMES_FOR_RATE = 8
_VP8_SHOW_FRAME = 0x10
_TRANSPORT_PACKETS = (188, 192, 204)  # bytes: plain, with the time of arrival, with parity
_ROUNDING_S = Fraction(1, 500)  # of edits: QuickTime's movies have 600 ticks a second
# What can ask for a rotation, which only the first frame shows: containers, and pictures by their EXIF.
ROTATING_CONTAINERS, ROTATING_CODEC = ("mov", "matroska"), "mjpeg"
MAX_PACKETS_TO_FIRST_FRAME = 200
# What FFmpeg takes for the rate of a stream of pictures that says none.
_RAW_FPS = Fraction(25)


def measured(video: OpenVideo, info: VideoInfo, limits: Limits, seen: list[VideoPacket]) -> VideoInfo:
    """Returns the description with what is shown, or as it is where reading takes too long.

    video: with only the packets `seen` read. It is left at any position.
    """
    reading = _Reading(video, info, limits, time.monotonic() + limits.max_measure_s)
    if info.parts:
        return reading.edited(seen)
    shown = reading.by_index() or reading.whole(seen)
    return replace(info, shown=shown)


@dataclass(slots=True)
class _Tally:
    """Adds up packets.

    num_frames: that are shown. first, last: the smallest and largest pts of one. end: the latest end of one.
    """

    info: VideoInfo
    num_frames: int = 0
    first: int | None = None
    last: int = 0
    end: int = 0
    step: int = 0  # between the last two in time
    times: list[int] | None = None  # of all frames, where wanted

    def add(self, packet: VideoPacket) -> None:
        """Count a packet, unless its frame is hidden or cannot be decoded."""
        pts = packet.dts if packet.pts is None else packet.pts
        if pts is None or not packet.size or self._is_hidden(packet):
            return
        self.num_frames += 1
        if self.times is not None:
            self.times.append(pts)
        if self.first is None:
            self.first = self.last = pts
        self.first = min(self.first, pts)
        if pts > self.last:
            self.step, self.last = pts - self.last, pts
        self.end = max(self.end, pts + (packet.duration or 0), self.last)

    def _is_hidden(self, packet: VideoPacket) -> bool:
        if packet.is_discard:
            return True
        return self.info.codec == "vp8" and not memoryview(packet)[0] & _VP8_SHOW_FRAME

    @property
    def shown(self) -> Shown:
        """Returns the sum. A last frame without duration lasts as long as the one before it."""
        return Shown(self.num_frames, self.end if self.end > self.last else self.last + self.step)


@dataclass(slots=True)
class _Reading:
    """Reads an open container for one measurement.

    until_s: on the monotonic clock. has_moved: whether more was read than its caller knows of.
    """

    video: OpenVideo
    info: VideoInfo
    limits: Limits
    until_s: float
    has_moved: bool = False

    def whole(self, seen: Sequence[VideoPacket]) -> Shown | None:
        """Reads every packet; None if the time is over, or there is none."""
        if not self.has_moved:
            tally = self._all(chain(seen, self._demux(self.video)))
        else:
            with open_video(self.video.media, open_timeout_s=self.limits.open_timeout_s) as again:
                tally = self._all(self._demux(again))
        return None if tally is None else tally.shown

    def edited(self, seen: Sequence[VideoPacket]) -> VideoInfo:
        """Returns the description with what edits show of the frames that are there."""
        info, tally = self.info, self._all(chain(seen, self._demux(self.video)))
        if tally is None or tally.times is None:
            return info
        times, last = sorted(tally.times), info.parts[-1]
        num_shown = sum(_num_shown(part, times, info.time_base) for part in info.parts)
        rest_s = (max(tally.shown.end_pts, last.start_pts + 1) - last.start_pts) * info.time_base
        if last.stop_pts > tally.shown.end_pts and last.stop_pts > last.start_pts + 1:
            last = replace(last, end_s=min(last.end_s, last.begin_s + rest_s))
        return replace(info, parts=(*info.parts[:-1], last), shown=Shown(num_shown, tally.shown.end_pts))

    def _all(self, packets: Iterator[VideoPacket]) -> _Tally | None:
        extradata = self.video.stream.codec_context.extradata
        tally = self._tally(timed(packets, self.info, extradata, SteadyClock()))
        return None if tally is None or not tally.num_frames else tally

    def by_index(self) -> Shown | None:
        """Reads the index and what it does not say; None where there is no index that says enough."""
        info, formats = self.info, self.info.container_format
        if info.is_fragmented or info.is_raw:
            return None
        if "mov" in formats:
            return self._of_mp4()
        if formats == "avi":
            return self._of_avi()
        return self._of_large_mkv() if "matroska" in formats else None

    def _of_mp4(self) -> Shown | None:
        """Counts the samples that edits show and that are in the file; reads from the last keyframe on."""
        size = self.video.media.size_bytes
        num_frames, last = 0, None
        for entry in self.video.stream.index_entries:
            if not entry.is_discard and entry.pos + entry.size <= size:
                num_frames, last = num_frames + 1, entry
        tail = None if last is None else self._tail(last.timestamp)
        return None if tail is None else Shown(num_frames, tail.shown.end_pts)

    def _of_avi(self) -> Shown | None:
        """Takes the number of the last chunk, if the index lists all that the header promises."""
        entries = self.video.stream.index_entries
        if not len(entries):
            return None
        last = entries[len(entries) - 1]
        number = last.timestamp + 1
        is_whole = last.pos + last.size <= self.video.media.size_bytes
        return Shown(number, number) if is_whole and number >= self.video.stream.frames else None

    def _of_large_mkv(self) -> Shown | None:
        """Reads from the last cue on, and believes the header's rate if it holds there."""
        if self.video.media.size_bytes <= _SMALL_BYTES:
            return None
        self.has_moved = True
        last_cue = _last_cue(self.video)
        tail = None if last_cue is None else self._tail(last_cue)
        if tail is None or tail.first is None or tail.num_frames < _MIN_FRAMES_FOR_RATE:
            return None
        wanted = float((tail.shown.end_pts - tail.first) * self.info.time_base) * self.info.fps
        has_rate = abs(wanted - tail.num_frames) <= _MAX_RATE_ERROR * tail.num_frames
        return Shown(None, tail.shown.end_pts) if has_rate else None

    def _tail(self, timestamp: int) -> _Tally | None:
        """Reads from the keyframe before a timestamp to the end; None if there is nothing, or no time."""
        self.has_moved = True
        try:
            self.video.container.seek(timestamp, stream=self.video.stream)
        except av.error.FFmpegError:
            return None
        tally = self._tally(self._demux(self.video))
        return None if tally is None or not tally.num_frames else tally

    def _tally(self, packets: Iterator[VideoPacket]) -> _Tally | None:
        """Adds packets up; None if the time is over, or there are more than the limits allow."""
        tally, before = _Tally(self.info, times=[] if self.info.parts else None), None
        for number, packet in enumerate(packets):
            if before is not None and packet.size:
                tally.add(before)
            before = packet if packet.size else before
            if number % _PACKETS_BETWEEN_LOOKS == 0 and time.monotonic() > self.until_s:
                return None
            if number > self.limits.max_frames:
                return None
        if before is not None and not (before.is_corrupt or self._is_cut):  # the file may end within it
            tally.add(before)
        return tally

    @property
    def _is_cut(self) -> bool:
        """Whether a transport stream ends within a packet of the transport, as FFmpeg does not tell."""
        is_ts, size = self.info.container_format == "mpegts", self.video.media.size_bytes
        return is_ts and all(size % packet for packet in _TRANSPORT_PACKETS)

    def _demux(self, video: OpenVideo) -> Iterator[VideoPacket]:
        """Yields packets from where a container is, past what cannot be read."""
        for _ in range(_MAX_READ_ERRORS):
            try:
                yield from video.container.demux(video.stream)
            except av.error.FFmpegError:
                continue
            return


def _num_shown(part: EditPart, times: Sequence[int], time_base: Fraction) -> int:
    """Returns how many frames a part shows. times: of all, in order, ticks.

    Edits are rounded to ticks of the movie, so that a neighbour may be shown for less than one.
    """
    rounding = min(math.floor(_ROUNDING_S / time_base), (part.stop_pts - part.start_pts) // 2)
    first = bisect_right(times, part.start_pts + rounding) - 1
    return max(1, bisect_left(times, part.stop_pts - rounding) - max(0, first))


def _last_cue(video: OpenVideo) -> int | None:
    """Returns the timestamp of the last keyframe that an MKV lists; None if it lists none."""
    stream: VideoStream = video.stream
    try:
        video.container.seek(stream.start_time or 0, stream=stream)  # cues are read at the first seek
    except av.error.FFmpegError:
        return None
    number = len(stream.index_entries)
    return stream.index_entries[number - 1].timestamp if number > 1 else None


def probe(source: Source | Media, *, limits: Limits = DEFAULT_LIMITS) -> VideoInfo:
    """Describe the first video stream of a path, bytes or file object.

    Raises MediaNotFoundError, UnsupportedMediaError, CorruptMediaError or MediaLimitError.
    """
    with open_as_shown(as_media(source), limits.open_timeout_s) as video:
        return probe_open(video, limits)


def probe_open(video: OpenVideo, limits: Limits, *, has_keyframes: bool = True) -> VideoInfo:
    """Does what `probe` does, for an open container. has_keyframes: whether to list them, a step for each."""
    info = describe(video, has_keyframes=has_keyframes)
    check_size(video.media.name, info, len(video.container.streams), limits)
    check_memory(video.media.name, video.stream.codec_context, limits.max_decoder_bytes)
    seen: list[VideoPacket] = []
    if info.codec == ROTATING_CODEC or any(name in info.container_format for name in ROTATING_CONTAINERS):
        info = turned(info, first_rotation_deg(video, seen))
    info = measured(video, info, limits, seen)
    check_length(video.media.name, info, limits)
    return info


def turned(info: VideoInfo, rotation_deg: int) -> VideoInfo:
    """Returns the description of a video whose frames are turned clockwise by `rotation_deg`."""
    width, height = (info.height, info.width) if rotation_deg % 180 else (info.width, info.height)
    return replace(info, width=width, height=height, rotation_deg=rotation_deg)


def describe(video: OpenVideo, *, has_keyframes: bool = True) -> VideoInfo:
    """Returns the `VideoInfo` of an open container, its frames as they are stored.

    Raises CorruptMediaError for a stream without a size.
    """
    stream, container, context = video.stream, video.container, video.stream.codec_context
    if context.width < 1 or context.height < 1:
        raise CorruptMediaError(
            f"{video.media.name} has frames of {context.width} x {context.height} pixels; "
            "allowed 1 x 1 and more; copy or encode it again"
        )
    is_raw = container.format.name in RAW_FORMATS
    claimed_base = stream.time_base or Fraction(1, 1_000_000)
    # Pictures are numbered; where only their headers say the rate, the container's guess is 25.
    raw_base = 1 / (context.framerate or stream.guessed_rate or stream.average_rate or _RAW_FPS)
    time_base = raw_base if is_raw else claimed_base
    start_pts = 0 if is_raw else stream.start_time
    layout = read_layout(video.media, stream.id)
    keyframes = keyframe_index(video) if has_keyframes else ()
    return VideoInfo(
        codec=context.name,
        width=context.width,
        height=context.height,
        rotation_deg=0,
        time_base=time_base,
        start_pts=_first_pts(video) if start_pts is None else start_pts,
        duration_s_from_stream=float(stream.duration * claimed_base) if stream.duration else None,
        duration_s_from_container=container.duration / 1e6 if container.duration else None,
        average_fps_from_header=1 / time_base if is_raw else stream.average_rate or None,
        nominal_fps_guessed=stream.guessed_rate or None,
        num_frames_from_header=stream.frames or None,
        keyframe_ticks_from_index=tuple(keyframes) or None,
        container_format=container.format.name,
        pixel_format=context.pix_fmt,
        is_fragmented=layout.is_fragmented,
        parts=layout.parts(time_base),
    )


def _first_pts(video: OpenVideo) -> int:
    """Returns when the first packet is decoded, in ticks, of a file that does not say when it begins.

    In ASF, whose packets have no other time that could be trusted, this is when the first picture is shown.
    """
    with suppress(av.error.FFmpegError), open_video(video.media) as again:
        first = next(again.container.demux(again.stream), None)
        return 0 if first is None or first.dts is None else first.dts
    return 0


def keyframe_index(video: OpenVideo) -> list[int]:
    """Returns the timestamps of the keyframes the container lists, in ticks; empty without an index."""
    stream, is_matroska = video.stream, "matroska" in video.container.format.name
    try:
        if is_matroska:  # its cues are read at the first seek
            video.container.seek(stream.start_time or 0, stream=stream)
        if not is_matroska and not stream.frames:
            return []
        return list(_listed_keyframes(stream.index_entries))
    except av.error.FFmpegError:
        return []


def _listed_keyframes(entries: IndexEntries) -> Iterator[int]:
    """Yields increasing timestamps, by binary search: an hour has 100,000 entries, few of them keyframes."""
    place = entries.search_timestamp(-(1 << 62), backward=False)
    while place >= 0:
        timestamp = entries[place].timestamp
        yield timestamp
        before, place = place, entries.search_timestamp(timestamp + 1, backward=False)
        if place <= before:  # of an index that is not in order
            return


def _decoded(video: OpenVideo, packet: VideoPacket) -> list[VideoFrame]:
    """Decodes a packet, of which an edit list may hide the frame: a copy does not say so."""
    return video.stream.codec_context.decode(Packet(bytes(packet)) if packet.is_discard else packet)


def first_rotation_deg(video: OpenVideo, seen: list[VideoPacket]) -> int:
    """Returns the clockwise turn, 0, 90, 180 or 270 degrees, that makes the first frame upright.

    seen: receives the packets that were read.
    """
    try:
        for count, packet in enumerate(video.container.demux(video.stream)):
            seen.append(packet)
            for frame in _decoded(video, packet):
                matrix = display_matrix(frame)
                if matrix is None:
                    return 0
                return round(math.degrees(math.atan2(matrix[1], matrix[0])) / 90) * 90 % 360
            if count > MAX_PACKETS_TO_FIRST_FRAME:
                return 0
    except av.error.FFmpegError:
        return 0
    return 0
