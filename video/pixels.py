"""From a decoded frame to RGB at target size.

Exact: full-size RGB by swscale, turned upright, then torchvision's antialiased bicubic on uint8 - the
pixels the models' own processors make. Fast: swscale scales while it converts.

Shapes: H, W are pixels of the result; every array is uint8 [H, W, 3], RGB, C-contiguous.
"""

from __future__ import annotations

import numpy as np
import torch
from av.video.frame import VideoFrame
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from epd.types import UInt8Array

Size = tuple[int, int]


def exact_rgb(frame: VideoFrame, rotation_deg: int = 0) -> UInt8Array:
    """Full-size upright RGB, uint8 [H, W, 3]."""
    pixels: UInt8Array = np.asarray(frame.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)
    return np.ascontiguousarray(np.rot90(pixels, -rotation_deg // 90)) if rotation_deg else pixels


def exact_resize(pixels: UInt8Array, size: Size | None) -> UInt8Array:
    """Antialiased bicubic as torchvision does it on uint8; `size` is (height, width), None keeps the size."""
    if size is None or pixels.shape[:2] == tuple(size):
        return pixels
    image = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    resized = transforms.resize(image, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())
