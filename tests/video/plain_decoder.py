"""Decodes every frame of a container in order, in one pass: slow, and short enough to be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import av.error
import numpy as np
from av.video.frame import VideoFrame

from epd.errors import CorruptMediaError
from epd.types import Frames, UInt8Array
from epd.video.containers.avi_times import timed
from epd.video.containers.info import VideoInfo
from epd.video.containers.limits import DEFAULT_LIMITS
from epd.video.containers.mp4_edits import open_as_shown
from epd.video.containers.orientation import display_matrix, upright
from epd.video.containers.probe import describe
from epd.video.containers.steady_clock import SteadyClock
from epd.video.decoding.pixels import Size, exact_resize
from epd.video.decoding.session import FrameClock
from epd.video.sources.source import Media, OpenVideo, Source, as_media, reason

TimedFrame = tuple[int, VideoFrame]


def reference_decode(source: Source | Media, times_s: Sequence[float], size: Size | None = None) -> Frames:
    """Returns the frames on screen at `times_s`, in the order asked: the last with pts <= t, or the first.

    In AVI the n-th frame in order of display begins at n / rate: see `video/containers/avi_times.py`.

    Raises the MediaError of what is wrong with the file.
    """
    with open_as_shown(as_media(source), DEFAULT_LIMITS.open_timeout_s) as video:
        info = describe(video)
        wanted = [info.pts_at(time_s) for time_s in times_s]
        shown = dict(_frames_on_screen(_decoded(video, info), sorted(set(wanted)), video.media.name, size))
    images = [shown[pts][1] for pts in wanted]
    height, width = size or (info.height, info.width)
    data = np.stack(images) if images else np.zeros((0, height, width, 3), np.uint8)
    return Frames(data, np.array([info.seconds(shown[pts][0]) for pts in wanted], dtype=np.float64))


def _frames_on_screen(
    frames: Iterator[TimedFrame], wanted: list[int], name: str, size: Size | None
) -> Iterator[tuple[int, tuple[int, UInt8Array]]]:
    """Yields (wanted pts, (frame pts, pixels)) in increasing order."""
    before: TimedFrame | None = None
    remaining = iter(wanted)
    target = next(remaining, None)
    for frame in frames:
        while target is not None and frame[0] > target:
            yield target, _pixels(before or frame, size)
            target = next(remaining, None)
        before = frame
    if before is None:
        raise CorruptMediaError(f"{name} holds no frame that decodes; allowed: complete files; copy it again")
    while target is not None:
        yield target, _pixels(before, size)
        target = next(remaining, None)


def _decoded(video: OpenVideo, info: VideoInfo) -> Iterator[TimedFrame]:
    clock = FrameClock(info)
    try:
        packets = video.container.demux(video.stream)
        for packet in timed(packets, info, video.stream.codec_context.extradata, SteadyClock()):
            clock.fed(packet if packet.size else None)
            for frame in packet.decode():
                pts = clock.pts(frame)
                if pts is not None:
                    yield pts, frame
    except av.error.FFmpegError as error:
        raise CorruptMediaError(
            f"{video.media.name} cannot be decoded ({reason(error)}); allowed: complete files; copy it again"
        ) from error


def _pixels(timed: TimedFrame, size: Size | None) -> tuple[int, UInt8Array]:
    """PyAV's plain conversion, turned upright."""
    frame = timed[1]
    pixels = np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)
    return timed[0], exact_resize(upright(pixels, display_matrix(frame)), size)
