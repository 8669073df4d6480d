"""Small videos and images for the tests, drawn and encoded on the spot: a square crossing a shaded ground."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from epd.types import UInt8Array
from epd.video.demo_video import encode_h264
from tests.video.recipes import packets_of


def draw_frames(num_frames: int, height: int, width: int, seed: int) -> Iterator[UInt8Array]:
    """Frames uint8 [H, W, 3], no two of them alike."""
    rng = np.random.default_rng(seed)
    ground = np.linspace(30, 120, height * width, dtype=np.float64).reshape(height, width, 1)
    tint, colour = rng.uniform(0.3, 1.0, 3), rng.integers(100, 256, 3)
    side = height // 3
    for index in range(num_frames):
        frame = (ground * tint).astype(np.uint8)
        left = index * (width - side) // max(1, num_frames - 1)
        top = (index * 7) % (height - side)
        frame[top : top + side, left : left + side] = colour
        yield frame


def write_video(
    path: Path, *, num_frames: int = 40, fps: int = 10, height: int = 90, width: int = 160, seed: int = 0
) -> Path:
    """An H.264 MP4 with keyframes every two seconds and B-frames; height and width even."""
    encode_h264(
        path, draw_frames(num_frames, height, width, seed), fps=Fraction(fps), height=height, width=width
    )
    return path


def write_long_video(path: Path, seconds: int, *, height: int = 64, width: int = 96) -> Path:
    """A video at 1 fps of any length: 20 seconds are drawn and encoded, and their packets repeated."""
    part = path.with_suffix(".part.mp4")
    frames = draw_frames(20, height, width, seed=3)
    encode_h264(part, frames, fps=Fraction(1), height=height, width=width, crf=45)
    with av.open(str(part)) as source, av.open(str(path), "w", format="mp4") as target:
        stream = source.streams.video[0]
        copied = target.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.dts is not None]
        second = round(1 / packets[0].time_base)
        times = [(packet.pts, packet.dts) for packet in packets]
        for number in range(seconds):
            (pts, dts), packet = times[number % 20], packets[number % 20]
            packet.stream = copied
            packet.pts, packet.dts = (each + number // 20 * 20 * second for each in (pts, dts))
            target.mux(packet)
    part.unlink()
    return path


def write_damaged_video(path: Path) -> Path:
    """`write_video` with two packets zeroed: of 8 frames spread over it, one cannot be decoded."""
    data = bytearray(write_video(path).read_bytes())
    for position, size, _, _ in packets_of(bytes(data))[28:30]:
        data[position : position + size] = bytes(size)
    path.write_bytes(data)
    return path


def write_still_video(path: Path, *, num_still: int = 30, num_moving: int = 10) -> Path:
    """The same at 10 fps, its first frame shown for a while; without loss, so that what is equal stays so."""
    first, *rest = draw_frames(1 + num_moving, 90, 160, seed=4)
    encode_h264(path, [first] * num_still + rest, fps=Fraction(10), height=90, width=160, crf=0)
    return path


def write_image(path: Path, *, height: int = 100, width: int = 76, seed: int = 1) -> Path:
    """A PNG."""
    Image.fromarray(next(draw_frames(1, height, width, seed))).save(path)
    return path


def write_audio_only(path: Path) -> Path:
    """A real MP4 with sound and no picture."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), "fltp", "mono")
        silence.sample_rate = 16000
        container.mux(stream.encode(silence))
        container.mux(stream.encode(None))
    return path
