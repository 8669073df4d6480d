"""Computes the rotations of a pass once, for all of its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epd.stages.decoder.text_model import TextModel


@dataclass(frozen=True, slots=True)
class Rotations:
    """Holds cosines and sines of a pass, in the type of its rows; each in one piece, as the kernel reads it.

    cos: [T, 1, 1, D / 2]. sin: [T, 1, 2, D / 2], negative for the first half of a head.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, model: TextModel, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """Computes them for positions, int64 [rows, T]: three rows for M-RoPE, else one."""
        turned = positions.to(torch.float32)
        if model.row_of_frequency is None or len(turned) == 1:
            angles = turned[0, :, None] * model.inv_freq
        else:
            angles = turned.t().index_select(1, model.row_of_frequency) * model.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if model.rope_scale != 1.0:
            cos, sin = cos * model.rope_scale, sin * model.rope_scale
        both = torch.stack((-sin, sin), dim=1).to(dtype)
        return cls(cos.to(dtype)[:, None, None], both[:, None])
