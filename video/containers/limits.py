"""Limits what a video may cost before it is refused."""

from __future__ import annotations

from dataclasses import dataclass

from epd.errors import MediaLimitError
from epd.video.containers.info import VideoInfo


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds checked at probe (pixels, length, streams) and while decoding (time, damage, memory)."""

    max_pixels: int = 8192 * 8192
    max_duration_s: float = 24 * 3600.0
    max_frames: int = 10_000_000  # a day at 115 frames a second
    max_streams: int = 64
    max_decoder_bytes: int = 1 << 30  # of all decoders of a video together, estimated
    open_timeout_s: float = 20.0
    max_measure_s: float = 10.0  # of reading packets to find the length; then the header's claim counts
    max_gop_s: float = 60.0  # busy time of one decoder on one run of packets
    max_file_s: float = 3600.0  # time a consumer may have to wait in all
    max_substituted_fraction: float = 0.25
    max_output_bytes: int = 16 << 30


DEFAULT_LIMITS = Limits()


def check_size(name: str, info: VideoInfo, num_streams: int, limits: Limits) -> None:
    """Raises MediaLimitError for frames or streams that are more than the limits allow."""
    _check(name, "pixels a frame", info.width * info.height, limits.max_pixels)
    _check(name, "streams", num_streams, limits.max_streams)


def check_length(name: str, info: VideoInfo, limits: Limits) -> None:
    """Raises MediaLimitError for a video that is longer than the limits allow."""
    _check(name, "seconds", info.duration_s, limits.max_duration_s)
    _check(name, "frames", info.num_frames, limits.max_frames)


def _check(name: str, what: str, received: float, allowed: float) -> None:
    if received > allowed:
        raise MediaLimitError(f"{name} has {received:g} {what}; allowed {allowed:g}; cut or scale the video")
