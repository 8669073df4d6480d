"""Synthetic videos and the recipes they are made by: small, deterministic, its number in every frame."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import av
import numpy as np

from epd.types import UInt8Array
from tests.scheduling import as_before
from tests.video.mpeg4 import Chunks, packed, rewrite, with_gaps

GRID = Fraction(1, 600)  # seconds; fine enough for every rate and variable rate used here
NUMBER_BITS, NUMBER_ROWS = 8, 16  # of the number in each picture: cells across, pixels high


@dataclass(frozen=True)
class Recipe:
    """How to make one video. `gaps`: ticks of GRID between frames, repeated; `start`: ticks to the first.

    repeats: frames that show what the frame before them shows. chunks: of an MPEG-4 video in AVI, where they
    are others than its encoder's.
    """

    name: str
    codec: str = "libx264"
    options: dict[str, str] = field(default_factory=dict)
    container_options: dict[str, str] = field(default_factory=dict)
    num_frames: int = 60
    width: int = 128
    height: int = 96
    pixel_format: str = "yuv420p"
    gaps: tuple[int, ...] = (20,)
    start: int = 0
    rotation_deg: int = 0
    is_mirrored: bool = False
    has_audio: bool = False
    has_number: bool = True
    repeats: frozenset[int] = frozenset()
    chunks: Chunks | None = None

    @property
    def fps(self) -> Fraction:
        return 1 / (GRID * self.gaps[0])

    def picture(self, number: int) -> np.ndarray:
        """What a frame with this number shows, uint8 [H, W, 3]."""
        image = picture(number, self.width, self.height)
        return numbered(image, number) if self.has_number else image

    @property
    def starts_s(self) -> list[float]:
        """When the encoder was told to show each frame, and the end of the last; seconds from the first."""
        gaps = (self.gaps[index % len(self.gaps)] for index in range(self.num_frames))
        return [float(ticks * GRID) for ticks in accumulate(gaps, initial=0)]

    @property
    def numbers(self) -> list[int]:
        """The number in each frame."""
        return [
            max(number for number in range(index + 1) if number not in self.repeats)
            for index in range(self.num_frames)
        ]


def picture(index: int, width: int, height: int) -> np.ndarray:
    """Frame number `index`: moving gradients and a block that jumps, uint8 [H, W, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    image = np.stack([x * 2 + index * 3, y * 2 + index * 5, x + y + index * 7], axis=-1) % 256
    left, top = index * 11 % max(1, width - 16), index * 7 % max(1, height - 16)
    image[top : top + 16, left : left + 16] = (index * 37 % 256, 255 - index * 13 % 256, 128)
    return image.astype(np.uint8)


def numbered(image: UInt8Array, number: int) -> UInt8Array:
    """The picture with its number below: white and black cells, the lowest bit at the left."""
    cell = image.shape[1] // NUMBER_BITS
    for bit in range(NUMBER_BITS):
        image[-NUMBER_ROWS:, bit * cell : (bit + 1) * cell] = 255 * (number >> bit & 1)
    return image


def number_in(image: UInt8Array) -> int:
    """The number in a decoded picture, as `numbered` draws it."""
    cell = image.shape[1] // NUMBER_BITS
    row = image[image.shape[0] - NUMBER_ROWS // 2, cell // 2 : cell * NUMBER_BITS : cell].mean(axis=-1)
    return sum(1 << bit for bit, value in enumerate(row) if value > 127)


def make(recipe: Recipe, path: Path) -> Path:
    """Encode a recipe."""
    if recipe.chunks is None:
        return _encode(recipe, path)
    plain = _encode(recipe, path.with_suffix(".plain.mp4"))
    rewrite(plain, path, recipe.chunks, int(recipe.fps))
    plain.unlink()
    return path


def _encode(recipe: Recipe, path: Path) -> Path:
    with as_before(), av.open(str(path), "w", options=recipe.container_options) as container:
        stream = container.add_stream(recipe.codec, rate=recipe.fps, options=dict(recipe.options))
        stream.width, stream.height, stream.pix_fmt = recipe.width, recipe.height, recipe.pixel_format
        stream.thread_count = 1
        constant = len(recipe.gaps) == 1 and recipe.start % recipe.gaps[0] == 0
        if not constant:
            stream.codec_context.time_base = GRID
        if recipe.rotation_deg or recipe.is_mirrored:
            stream.set_display_rotation(recipe.rotation_deg, hflip=recipe.is_mirrored)
        # AAC begins before the first picture, for which the AVI muxer makes an empty chunk.
        codec = "pcm_s16le" if path.suffix == ".avi" else "aac"
        audio = container.add_stream(codec, rate=16_000, layout="mono") if recipe.has_audio else None
        ticks = recipe.start
        for index, number in enumerate(recipe.numbers):
            frame = av.VideoFrame.from_ndarray(recipe.picture(number), "rgb24")
            frame.time_base = 1 / recipe.fps if constant else GRID
            frame.pts = ticks // recipe.gaps[0] if constant else ticks
            ticks += recipe.gaps[index % len(recipe.gaps)]
            container.mux(stream.encode(frame))
            if audio is not None and index % 2 == 0:
                container.mux(audio.encode(_silence(index // 2)))
        container.mux(stream.encode())
        if audio is not None:
            container.mux(audio.encode())
    return path


def _silence(index: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
    frame.sample_rate, frame.pts, frame.time_base = 16_000, index * 1024, Fraction(1, 16_000)
    return frame


def audio_only(path: Path) -> Path:
    """A file with sound and no picture."""
    with av.open(str(path), "w") as container:
        audio = container.add_stream("aac", rate=16_000, layout="mono")
        for index in range(20):
            container.mux(audio.encode(_silence(index)))
        container.mux(audio.encode())
    return path


X264 = {"preset": "ultrafast", "bf": "0"}
GOP15 = {"preset": "veryfast", "g": "15", "keyint_min": "15", "sc_threshold": "0", "bf": "2"}
PYRAMID = {"preset": "medium", "g": "30", "x264-params": "bframes=3:b-pyramid=normal:b-adapt=0:scenecut=0"}
OPEN_GOP = {
    "preset": "medium",
    "x264-params": "keyint=20:min-keyint=20:open-gop=1:bframes=3:b-adapt=0:scenecut=0",
}
X265 = {"preset": "ultrafast", "x265-params": "keyint=20:min-keyint=20:bframes=4:log-level=none:pools=none"}
X265_OPEN = {
    "preset": "fast",
    "x265-params": "keyint=20:open-gop=1:log-level=none:pools=none:frame-threads=1",
}
VP9 = {"g": "20", "deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "0"}
VP9_ALT_REF = {"g": "30", "deadline": "good", "cpu-used": "8", "auto-alt-ref": "1", "lag-in-frames": "16"}
AV1 = {"preset": "12", "g": "20", "svtav1-params": "lp=1"}
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
ASP = {"g": "15", "bf": "2"}
STILLS, STILL_BS = frozenset({4, 5, 6, 17, 40, 59}), frozenset({4, 11, 22, 32})
VFR = (20, 40, 5, 10, 100, 25)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("h264_b.mp4", options=GOP15),
        Recipe("h264_pyramid.mp4", options=PYRAMID),
        Recipe("h264_open_gop.mp4", options=OPEN_GOP),
        Recipe("h264_open_gop.mkv", options=OPEN_GOP),
        Recipe("h264_open_gop.ts", options=OPEN_GOP),
        Recipe("h264_one_key.mp4", options={**PYRAMID, "g": "600"}),
        Recipe("h264_one_key.ts", options={**PYRAMID, "g": "600"}),
        Recipe("h264_intra.mp4", options={**X264, "g": "1"}),
        Recipe("h264_short_gop.mp4", options={**GOP15, "g": "4", "keyint_min": "4"}),
        Recipe("h264_fragmented.mp4", options=GOP15, container_options=FRAGMENTED),
        Recipe("h264.mov", options=GOP15),
        Recipe("h264.mkv", options=GOP15),
        Recipe("h264.ts", options=GOP15),
        Recipe("h264.avi", options=GOP15),
        Recipe("h264_refresh.ts", options={**X264, "x264-params": "intra-refresh=1:keyint=15:bframes=0"}),
        Recipe("hevc.mp4", codec="libx265", options=X265),
        Recipe("hevc_open.mp4", codec="libx265", options=X265_OPEN),
        Recipe("hevc_open.ts", codec="libx265", options=X265_OPEN),
        Recipe("hevc_open.mkv", codec="libx265", options=X265_OPEN),
        Recipe("hevc_10bit.mp4", codec="libx265", options=X265, pixel_format="yuv420p10le"),
        Recipe("vp9.webm", codec="libvpx-vp9", options=VP9),
        Recipe("vp9_alt_ref.webm", codec="libvpx-vp9", options=VP9_ALT_REF),
        Recipe("vp8_alt_ref.webm", codec="libvpx", options=VP9_ALT_REF),
        Recipe("vp9.mp4", codec="libvpx-vp9", options=VP9),
        Recipe("av1.mp4", codec="libsvtav1", options=AV1),
        Recipe("av1.mkv", codec="libsvtav1", options=AV1),
        Recipe("mpeg4.mp4", codec="mpeg4", options={"g": "15", "bf": "2"}),
        Recipe("mpeg4.avi", codec="mpeg4", options={"g": "15", "bf": "2"}),
        Recipe("mpeg4_packed.avi", codec="mpeg4", options=ASP, chunks=packed),
        Recipe("mpeg4_packed_one_b.avi", codec="mpeg4", options={**ASP, "bf": "1"}, chunks=packed),
        Recipe("mpeg4_packed_one_key.avi", codec="mpeg4", options={**ASP, "g": "600"}, chunks=packed),
        Recipe("mpeg4_many_b.avi", codec="mpeg4", options={**ASP, "g": "24", "bf": "5"}),
        Recipe("mpeg4_no_b.avi", codec="mpeg4", options={**ASP, "bf": "0"}),
        Recipe(
            "mpeg4_not_coded.avi",
            codec="mpeg4",
            options={**ASP, "bf": "0"},
            repeats=STILLS,
            chunks=with_gaps(STILLS),
        ),
        Recipe(
            "mpeg4_not_coded.mp4",
            codec="mpeg4",
            options={**ASP, "bf": "0"},
            repeats=STILLS,
            chunks=with_gaps(STILLS),
        ),
        Recipe(
            "mpeg4_b_not_coded.avi",
            codec="mpeg4",
            options=ASP,
            repeats=STILL_BS,
            chunks=with_gaps(STILL_BS),
        ),
        Recipe("mpeg2.avi", codec="mpeg2video", options={"g": "15", "bf": "2"}, gaps=(24,)),
        Recipe("h264_no_b.avi", options={**GOP15, "bf": "0"}),
        Recipe("h264_pyramid.avi", options=PYRAMID),
        Recipe("audio.avi", codec="mpeg4", options=ASP, has_audio=True),
        Recipe("mjpeg.avi", codec="mjpeg", pixel_format="yuvj420p"),
        Recipe("mjpeg.mov", codec="mjpeg", pixel_format="yuvj420p"),
        Recipe("mpeg2.ts", codec="mpeg2video", options={"g": "15", "bf": "2"}, gaps=(24,)),
        Recipe("vfr.mp4", options=GOP15, gaps=VFR),
        Recipe("vfr_open_gop.mkv", options=OPEN_GOP, gaps=VFR),
        Recipe("vfr.ts", options=GOP15, gaps=VFR),
        Recipe("late_start.mp4", options=GOP15, start=907),
        Recipe("late_start.mkv", options=GOP15, start=907),
        Recipe("late_start.ts", options=PYRAMID, start=907),
        Recipe(
            "edit_list.mp4", options=GOP15, start=-140, container_options={"avoid_negative_ts": "disabled"}
        ),
        Recipe("rotated_90.mp4", options=GOP15, rotation_deg=90),
        Recipe("rotated_180.mov", options=GOP15, rotation_deg=180),
        Recipe("rotated_270.mkv", options=GOP15, rotation_deg=270),
        Recipe("mirrored.mp4", options=GOP15, rotation_deg=90, is_mirrored=True),
        Recipe("odd_size.mp4", options=GOP15, width=131, height=97, pixel_format="yuv444p"),
        Recipe("odd_size.webm", codec="libvpx-vp9", options=VP9, width=131, height=97),
        Recipe("interlaced.mp4", options={**GOP15, "x264-params": "tff=1"}),
        Recipe("interlaced.ts", options={**GOP15, "x264-params": "tff=1"}),
        Recipe("audio.mp4", options=GOP15, has_audio=True),
        Recipe("audio.ts", options=GOP15, has_audio=True),
        Recipe("audio.mkv", options=GOP15, has_audio=True),
        Recipe("ntsc.mp4", options=GOP15, gaps=(25,)),
        Recipe("full_range.mp4", options=GOP15, pixel_format="yuvj420p"),
        Recipe("portrait.mp4", options=GOP15, width=68, height=120, gaps=VFR, has_audio=True),
        Recipe(
            "phone.mov",
            options={**GOP15, "g": "600"},
            rotation_deg=270,
            gaps=(20, 20, 21, 19, 40),
            start=180,
            has_audio=True,
        ),
        Recipe("begins_late.mp4", options=GOP15, start=180, has_audio=True),
        Recipe("begins_late.mkv", options=GOP15, start=180, has_audio=True),
        Recipe("begins_late.ts", options=GOP15, start=180, has_audio=True),
        Recipe("one_frame.mp4", options=GOP15, num_frames=1),
    )
}


def with_bytes(path: Path, offset: int, data: bytes) -> bytes:
    """The file with some bytes overwritten."""
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(data)] = data
    return bytes(whole)


def packets_of(source: Path | bytes) -> list[tuple[int, int, int, bool]]:
    """(file position, size in bytes, pts, is keyframe) of every video packet."""
    with av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        return [(packet.pos or 0, packet.size, packet.pts or 0, packet.is_keyframe) for packet in packets]


def repeat(scene: Path, path: Path, times: int) -> Path:
    """One video after itself, packet by packet, so many times."""
    with av.open(str(path), "w") as out:
        stream = None
        shift = 0
        for _ in range(times):
            with av.open(str(scene)) as container:
                source = container.streams.video[0]
                stream = stream or out.add_stream_from_template(source)
                for packet in container.demux(source):
                    if packet.size and packet.pts is not None and packet.dts is not None:
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
                        out.mux(packet)
                shift += source.duration or 0
    return path
