"""Keeps values in 8 bits, each head of a token with a scale of its own: the twin of what the kernels do.

    row of a cache   | D codes, int8 | scale, float32 |        value = code * scale

Each token has scales of its own, since a block is filled token by token. A larger value would raise the scale
of a whole block and round its codes again. Codes are int8 and not FP8. A step of int8 is 1/127 of the largest
value, a step of FP8 up to 1/8 of each, and GPUs before 8.9 convert no FP8. Keys stay as they are: those of
Qwen2.5 have channels so large that 8 bits lose the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epd.kv.kv_room import SCALE_BYTES

_MOST = 127.0


def is_scaled(values: Tensor) -> bool:
    """Reports whether a cache of values, or a part of it, has codes and scales."""
    return values.dtype == torch.int8


def scaled(values: Tensor) -> Tensor:
    """Returns the rows of values [..., D]: int8 [..., D + SCALE_BYTES]."""
    exact = values.float()
    scales = exact.abs().amax(-1, keepdim=True) / _MOST
    rows = torch.empty(
        *values.shape[:-1], values.shape[-1] + SCALE_BYTES, dtype=torch.int8, device=values.device
    )
    rows[..., :-SCALE_BYTES] = (exact / torch.where(scales == 0, 1.0, scales) + 0.5).floor()
    rows[..., -SCALE_BYTES:].view(torch.float32).copy_(scales)
    return rows


def unscaled(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values [..., D] of rows int8 [..., D + SCALE_BYTES]; values of another type as they are."""
    if not is_scaled(values):
        return values
    return (values[..., :-SCALE_BYTES] * values[..., -SCALE_BYTES:].view(torch.float32)).to(dtype)
