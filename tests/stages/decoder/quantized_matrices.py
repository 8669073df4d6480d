"""Random quantised matrices, in the forms that are multiplied."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from epd.stages.kernels.quantized_plain import Fp8Matrix, Int4Matrix


def fp8_matrix(num_out: int, num_in: int, block: tuple[int, int] | None) -> Fp8Matrix:
    """block: whose values share a scale; those of a row if None."""
    values = torch.randn(num_out, num_in).clamp(-3, 3).to(torch.float8_e4m3fn)
    rows, columns = block or (1, num_in)
    scales = torch.rand(-(-num_out // rows), -(-num_in // columns)) + 0.5
    return Fp8Matrix(values, scales.bfloat16(), rows, columns)


def int4_matrix(num_out: int, num_in: int, group: int) -> Int4Matrix:
    packed = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (num_out, num_in // group), dtype=torch.uint8)
    return Int4Matrix(packed, zeros, (torch.rand(num_out, num_in // group) + 0.5).half())


def moved(matrix: Any, device: Any) -> Any:
    """The same matrix on a device."""
    values = {each.name: getattr(matrix, each.name) for each in fields(matrix)}
    return replace(
        matrix, **{name: each.to(device) for name, each in values.items() if torch.is_tensor(each)}
    )
