"""Converts decoded frames to RGB at target size.

Exact: full-size RGB by swscale, turned upright, then torchvision's antialiased bicubic on uint8 - the
pixels the models' own processors make. Fast: swscale scales while it converts, and differs from exact by a
few levels of 255 on average (the tests hold the bound).

Shapes: H, W are pixels of the result; every array is uint8 [H, W, 3], RGB.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from epd.types import UInt8Array
from epd.video.containers.orientation import DisplayMatrix, display_matrix, is_transposed, upright

Size = tuple[int, int]
ResizeMode = Literal["exact", "fast"]


class FrameConverter:
    """Converts frames of one stream; keeps swscale's tables between them. For one thread at a time."""

    def __init__(self, size: Size | None, mode: ResizeMode = "exact") -> None:
        self._size, self._mode = size, mode
        self._reformatter = VideoReformatter()
        self._matrix: DisplayMatrix | None = None
        self._rotation_deg: int | None = None  # PyAV's value for the frame that `_matrix` was read from

    def convert(self, frame: VideoFrame) -> UInt8Array:
        """Returns upright RGB at the target size, uint8 [H, W, 3]; it may be a view of a larger array."""
        matrix = self._matrix_of(frame)
        if self._mode == "fast" and self._size is not None:
            return upright(self._rgb(frame, stored_size(self._size, matrix)), matrix)
        return exact_resize(upright(self._rgb(frame, None), matrix), self._size)

    def _matrix_of(self, frame: VideoFrame) -> DisplayMatrix | None:
        """Returns the display matrix, read again only when the rotation changes.

        Reading it ties the frame into a cycle of references, which keeps its memory until the next garbage
        collection.
        """
        if frame.rotation != self._rotation_deg:
            self._matrix, self._rotation_deg = display_matrix(frame), frame.rotation
        return self._matrix

    def _rgb(self, frame: VideoFrame, size: Size | None) -> UInt8Array:
        height, width = size or (frame.height, frame.width)
        is_smaller = height * width < frame.height * frame.width
        scaler = Interpolation.AREA if is_smaller else Interpolation.BICUBIC
        rgb = self._reformatter.reformat(
            frame,
            width=width,
            height=height,
            format="rgb24",
            interpolation=scaler if size else Interpolation.BILINEAR,
            threads=1,
        )
        plane = rgb.planes[0]
        rows: UInt8Array = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        return rows[:height, : width * 3].reshape(height, width, 3)


def exact_resize(pixels: UInt8Array, size: Size | None) -> UInt8Array:
    """Resizes by torchvision's antialiased bicubic on uint8; `size` is (height, width), None keeps it."""
    if size is None or pixels.shape[:2] == tuple(size):
        return pixels
    import torch  # seconds and hundreds of megabytes

    if not pixels.flags.writeable:  # torch warns of memory it may not write; it only reads here
        pixels = pixels.copy()
    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # uint8 [1, 3, H, W], channels last
    resized = torch.nn.functional.interpolate(image, size, mode="bicubic", antialias=True)
    result: UInt8Array = resized[0].permute(1, 2, 0).numpy()
    return result


def stored_size(size: Size, matrix: DisplayMatrix | None) -> Size:
    """Returns (height, width) before frames are turned upright."""
    return (size[1], size[0]) if is_transposed(matrix) else size
