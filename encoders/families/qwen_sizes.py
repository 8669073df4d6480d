"""Computes the sizes that Qwen-VL's processors resize to: multiples of a factor, within limits of pixels."""

from __future__ import annotations

import math

_MOST_ASPECT = 200


def image_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns (height, width) of an image, or of a frame that is sized alone, pixels.

    Raises ValueError for an impossible shape.
    """
    return _fitted(1, 1, (height, width), factor, (min_pixels, max_pixels))


def frame_size(
    num_frames: int, unit: int, height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Returns (height, width) of each of some frames, pixels. The limits are of all of them together.

    num_frames: at least the frames of a unit. Raises ValueError for an impossible shape.
    """
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    whole = round(num_frames / unit) * unit
    return _fitted(num_frames, whole, (height, width), factor, (min_pixels, max_pixels))


def _fitted(
    num_frames: int, num_whole: int, size: tuple[int, int], factor: int, limits: tuple[int, int]
) -> tuple[int, int]:
    """Rounds the size, or scales it into the limits. num_whole: frames in whole units, which are counted."""
    height, width = size
    aspect = max(size) / min(size)
    if aspect > _MOST_ASPECT:
        raise ValueError(f"absolute aspect ratio must be smaller than {_MOST_ASPECT}, got {aspect}")
    rows, columns = round(height / factor), round(width / factor)
    num_pixels, (least, most) = num_whole * rows * columns * factor**2, limits
    if num_pixels > most:
        scale = math.sqrt(num_frames * height * width / most)
        rows, columns = (max(1, math.floor(side / scale / factor)) for side in size)
    elif num_pixels < least:
        scale = math.sqrt(least / (num_frames * height * width))
        rows, columns = (math.ceil(side * scale / factor) for side in size)
    return rows * factor, columns * factor
