"""`probe`: what a video is, read from its container without decoding it."""

from __future__ import annotations

from fractions import Fraction

from video.info import VideoInfo
from video.source import Media, OpenVideo, Source, open_video


def probe(source: Source | Media) -> VideoInfo:
    """Describe the first video stream of a path, bytes or file object.

    Raises MediaNotFoundError, UnsupportedMediaError or CorruptMediaError.
    """
    with open_video(source) as video:
        return describe(video)


def describe(video: OpenVideo) -> VideoInfo:
    """The `VideoInfo` of an open container."""
    stream, container = video.stream, video.container
    time_base = stream.time_base or Fraction(1, 1_000_000)
    start_pts = stream.start_time or 0
    context = stream.codec_context
    return VideoInfo(
        codec=context.name,
        width=context.width,
        height=context.height,
        rotation_deg=0,
        time_base=time_base,
        start_pts=start_pts,
        duration_s_from_stream=float(stream.duration * time_base) if stream.duration else None,
        duration_s_from_container=container.duration / 1e6 if container.duration else None,
        average_fps_from_header=stream.average_rate or None,
        nominal_fps_guessed=stream.guessed_rate or None,
        num_frames_from_header=stream.frames or None,
        num_frames_from_index=None,
        keyframe_times_s_from_index=None,
        container_format=container.format.name,
        pixel_format=context.pix_fmt,
    )
