"""Resizes as the models' own processors do. Imports torch: what does not resize never imports it."""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate

from epd.types import UInt8Array


def resize(pixels: UInt8Array, size: tuple[int, int]) -> UInt8Array:
    """Returns the pixels resized by torch's antialiased bicubic on uint8.

    pixels: uint8 [H, W, 3]
    size: (height, width) of the result
    """
    if not pixels.flags.writeable:  # torch warns of memory it may not write; it only reads here
        pixels = pixels.copy()
    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # uint8 [1, 3, H, W], channels last
    resized = interpolate(image, size, mode="bicubic", antialias=True)
    result: UInt8Array = resized[0].permute(1, 2, 0).numpy()
    return result
