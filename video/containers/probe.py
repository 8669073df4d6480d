"""Describes a video from its container, decoding one frame at most, for its rotation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import av.error
from av.index import IndexEntries

from epd.errors import CorruptMediaError
from epd.video.containers.decoder_memory import check_memory
from epd.video.containers.info import RAW_FORMATS, VideoInfo
from epd.video.containers.limits import DEFAULT_LIMITS, Limits, check_length, check_size
from epd.video.containers.measure import measured
from epd.video.containers.mp4_edits import open_as_shown, read_layout
from epd.video.containers.orientation import display_matrix
from epd.video.sources.source import Media, OpenVideo, Source, VideoPacket, as_media, open_video

# Containers that can ask for a rotation, which only the first frame shows.
ROTATING_CONTAINERS = ("mov", "matroska")
MAX_PACKETS_TO_FIRST_FRAME = 200
# What FFmpeg takes for the rate of a stream of pictures that says none.
_RAW_FPS = Fraction(25)


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
    if any(name in info.container_format for name in ROTATING_CONTAINERS):
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


def first_rotation_deg(video: OpenVideo, seen: list[VideoPacket]) -> int:
    """Returns the clockwise turn, 0, 90, 180 or 270 degrees, that makes the first frame upright.

    seen: receives the packets that were read.
    """
    try:
        for count, packet in enumerate(video.container.demux(video.stream)):
            seen.append(packet)
            for frame in packet.decode():
                matrix = display_matrix(frame)
                if matrix is None:
                    return 0
                return round(math.degrees(math.atan2(matrix[1], matrix[0])) / 90) * 90 % 360
            if count > MAX_PACKETS_TO_FIRST_FRAME:
                return 0
    except av.error.FFmpegError:
        return 0
    return 0
