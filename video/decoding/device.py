"""Decodes on a GPU: its decoders (NVDEC) give NV12 or P010, which becomes RGB of the wanted size there.

    packets -> NVDEC -> NV12, P010 -> RGB -> target size -> host        several sessions, each a decoder
            \\> libavcodec, where the GPU cannot: the exact reader's way, in the same session

Which frames, and their times, are the exact reader's: only what decodes and converts them is another. Every
decoder of H.264 and HEVC gives the same samples. They are rounded as swscale and `exact_resize` do, so that
8-bit frames differ by a level here and there. A GPU says less of damage within a frame.

Shapes: h, w are stored pixels, H, W those of the result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import av.error
from av.codec.hwaccel import HWAccel
from av.video.frame import VideoFrame

from epd.errors import MediaError, UnavailableError, UnsupportedMediaError
from epd.late_module import LateModule
from epd.types import UInt8Array
from epd.video.containers.info import VideoInfo
from epd.video.containers.orientation import is_transposed, upright
from epd.video.decoding.pixels import FrameConverter, ResizeMode, Size, stored_size
from epd.video.decoding.session import DecoderSession
from epd.video.sources.source import Media, OpenVideo, VideoPacket, open_video

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
torch = LateModule("torch")  # takes seconds, and most files are decoded without it

# What NVDEC decodes and its planes can be taken of. Others stay with the CPU: 4:2:2, 4:4:4, 10-bit H.264.
_FORMATS = {
    "h264": frozenset({"yuv420p", "yuvj420p"}),
    "hevc": frozenset({"yuv420p", "yuvj420p", "yuv420p10le"}),
}
# Of libavcodec, where the GPU or its driver fails; damage is another.
_FAILURES = (av.error.ExternalError, av.error.UnknownError, MemoryError)
# Failures in a row after which a device is left alone, until the process that counts is started again.
MAX_FAILURES = 3
# Shares of red and blue in luma, by the matrix's number (ITU-T H.273); BT.601 where a stream has none.
_LUMA_SHARES = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593)}
_BT601 = (0.299, 0.114)
_FULL_RANGE = 2


class DeviceFailedError(UnavailableError):
    """A GPU does not decode, or not any more; the CPU can."""


class VideoDevice:
    """A GPU that decodes videos. For any thread.

    name: torch's, such as "cuda:1".
    num_sessions: decoders at work on one video; each takes some 100 MB of the device's memory at 1080p.
    is_alone: whether what it cannot decode is an error, and not the CPU's.
    num_frames: that it gave. num_failures: videos that it began and the CPU had to end.
    """

    def __init__(self, name: str = "cuda", num_sessions: int = 4, *, is_alone: bool = False) -> None:
        """Opens nothing yet."""
        self.name, self.num_sessions, self.is_alone = name, num_sessions, is_alone
        self.num_frames = self.num_failures = self._num_in_a_row = 0
        self._has_said = False
        self._lock = threading.Lock()
        self.converting = threading.Lock()  # a frame at a time, as on the device: it takes 200 bytes a pixel

    def takes(self, info: VideoInfo) -> bool:
        """Returns whether to decode a video here: it is of a kind that NVDEC knows, and the device works.

        Raises UnsupportedMediaError for others if it is alone.
        """
        is_even = info.width % 2 == info.height % 2 == 0
        is_known = is_even and info.pixel_format in _FORMATS.get(info.codec, ())
        if not is_known:
            kind = f"{info.codec} of {info.pixel_format} pixels and {info.width} x {info.height}"
            self.leave(f"{self.name} decodes no {kind}")
        return is_known and self._num_in_a_row < MAX_FAILURES

    def open(self, media: Media, open_timeout_s: float) -> OpenVideo:
        """Opens a video whose frames stay on the device, in the context that torch has for it.

        FFmpeg does not share the primary context once torch has it, with flags of its own; it takes the one
        that is current in this thread. Raises what torch and FFmpeg do.
        """
        index = torch.device(self.name).index or 0
        torch.cuda.set_device(index)
        torch.cuda.synchronize()  # now the context is there, and current
        options: dict[str, object] = {"primary_ctx": "0", "current_ctx": "1"}
        accel = HWAccel("cuda", str(index), allow_software_fallback=True, options=options, is_hw_owned=True)
        return open_video(media, open_timeout_s=open_timeout_s, hwaccel=accel)

    def planes(self, frame: VideoFrame) -> tuple[Tensor, Tensor] | None:
        """Returns luma [h, w] and chroma [h / 2, w / 2, 2], views of a frame; None for one of libavcodec's.

        uint8, or uint16 with the value in the upper bits.
        """
        if frame.format.name != "cuda":
            return None
        # A stream would be refused: NVDEC's copies are made on the default one, which is this thread's too.
        luma, chroma = (torch.from_dlpack(plane.__dlpack__()) for plane in frame.planes)
        return luma, chroma

    def new_session(self, media: Media, info: VideoInfo, open_timeout_s: float) -> DecoderSession:
        """Returns a decoder of a video. Raises DeviceFailedError."""
        with failing_as(f"{self.name} opens no video"), self.open(media, open_timeout_s) as video:
            return DeviceSession(video.stream.codec_context, info)

    def count_frame(self) -> None:
        with self._lock:
            self.num_frames += 1

    def note(self, failure: Exception | None) -> None:
        """Notes that a video failed here; None: that one was decoded."""
        if failure is not None and not self._num_in_a_row:
            logger.warning("%s; the CPU decodes in its place", failure)
        self._num_in_a_row = 0 if failure is None else self._num_in_a_row + 1
        self.num_failures += failure is not None

    def leave(self, what: str) -> None:
        """Leaves a video to the CPU, and says so once. Raises UnsupportedMediaError if it is alone."""
        if self.is_alone:
            raise UnsupportedMediaError(f"{what}; allowed: 4:2:0 of even sides; decode it on the CPU")
        if not self._has_said:
            logger.warning("%s; the CPU decodes it, and all that is alike", what)
        self._has_said = True


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Turns whatever torch, the driver or FFmpeg raise for a device that fails into DeviceFailedError."""
    try:
        yield
    except (RuntimeError, AssertionError, NotImplementedError, MediaError, *_FAILURES) as error:
        raise DeviceFailedError(f"{what} ({type(error).__name__}: {error}); look at its driver") from error


class DeviceSession(DecoderSession):
    """A decoder of a device, whose failure is not the file's damage."""

    def _frames(self, packet: VideoPacket | None) -> list[VideoFrame]:
        with failing_as("the GPU decodes no frame"):
            return super()._frames(packet)


class DeviceConverter(FrameConverter):
    """Converts frames where they are, on a device; those of libavcodec as the exact reader does."""

    def __init__(self, device: VideoDevice, size: Size | None, mode: ResizeMode = "exact") -> None:
        super().__init__(size, mode)
        self._device = device

    def convert(self, frame: VideoFrame) -> UInt8Array:
        """Returns what `FrameConverter.convert` does. Raises DeviceFailedError."""
        with failing_as(f"{self._device.name} converts no frame"):
            planes = self._device.planes(frame)
        if planes is None:
            self._device.leave(f"{self._device.name} gives no frame of its own")
            return super().convert(frame)
        self._device.count_frame()
        matrix = self._matrix_of(frame)
        with failing_as(f"{self._device.name} converts no frame"), self._device.converting:
            rgb = rgb_of(frame, *planes)
            size = None if self._size is None else stored_size(self._size, matrix)
            pixels: UInt8Array = resized(rgb, size, is_turned=is_transposed(matrix)).cpu().numpy()
        return upright(pixels, matrix)


def new_converter(device: VideoDevice | None, size: Size | None, mode: ResizeMode) -> FrameConverter:
    """Returns what converts frames of a device, or of the CPU."""
    return FrameConverter(size, mode) if device is None else DeviceConverter(device, size, mode)


def rgb_of(frame: VideoFrame, luma: Tensor, chroma: Tensor) -> Tensor:
    """Returns float32 [3, h, w], whole numbers of 0 to 255, as swscale makes them of planar frames.

    frame: of which only the matrix, the range and the order of its lines are read.
    luma, chroma: see `VideoDevice.planes`.
    """
    is_full = frame.color_range == _FULL_RANGE
    red, blue = _LUMA_SHARES.get(frame.colorspace, _BT601)
    green = 1 - red - blue
    y, uv = _eight_bits(luma, chroma, is_interlaced=frame.interlaced_frame)
    uv = (uv - 128) * (1.0 if is_full else 255 / 224)
    y = y.floor_() if is_full else y.sub_(16).mul_(255 / 219).floor_()
    u, v = uv.repeat_interleave(2, -1)
    planes = (
        y + (2 * (1 - red) * v).floor_(),
        y + (-2 * (1 - blue) * blue / green * u).floor_() + (-2 * (1 - red) * red / green * v).floor_(),
        y + (2 * (1 - blue) * u).floor_(),
    )
    rgb: Tensor = torch.stack(planes).clamp_(0, 255)
    return rgb


def _eight_bits(luma: Tensor, chroma: Tensor, *, is_interlaced: bool) -> tuple[Tensor, Tensor]:
    """Returns luma float32 [h, w] and chroma float32 [2, h, w / 2] of 8 bits.

    Of 8 bits the nearest line of chroma is taken, in interlaced frames that of the same field; deeper chroma
    is brought to the place of the luma by swscale's weights.
    """
    y, uv = luma.to(torch.float32), chroma.to(torch.float32).permute(2, 0, 1)
    if luma.dtype == torch.uint8:
        lines = torch.arange(len(y), device=y.device)
        lines = lines // 4 * 2 + lines % 2 if is_interlaced else lines // 2
        return y, uv[:, lines.clamp_(max=uv.shape[1] - 1)]
    uv = torch.nn.functional.interpolate(uv[None], scale_factor=(2, 1), mode="bilinear")[0]
    uv = 0.75 * uv + 0.25 * torch.cat((uv[..., 1:], uv[..., -1:]), -1)
    return y.div_(256).round_(), uv.div_(256).round_()


def resized(rgb: Tensor, size: Size | None, *, is_turned: bool) -> Tensor:
    """Resizes float32 [3, h, w] to uint8 [H, W, 3] by the filter of `exact_resize`; None keeps the size.

    In two passes with whole numbers between them, as on bytes: first along what will be rows.
    """
    steps: tuple[Size, ...] = ()
    if size is not None:
        steps = ((size[0], rgb.shape[2]) if is_turned else (rgb.shape[1], size[1]), size)
    for step in steps:
        if rgb.shape[1:] != step:
            rgb = torch.nn.functional.interpolate(rgb[None], step, mode="bicubic", antialias=True)[0]
            rgb = rgb.round_().clamp_(0, 255)
    return rgb.to(torch.uint8).permute(1, 2, 0).contiguous()
