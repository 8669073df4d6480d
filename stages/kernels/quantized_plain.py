"""Holds quantised matrices, and multiplies by them in plain torch: the twins of `quantized_products`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from epd.types import ceil_div

# Values of a matrix that are dequantised at a time.
_PIECE = 2**22
FP8_MAX = 448.0
# cuBLAS wants the scales of a column of rows to begin at 16 bytes.
ROWS_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Holds FP8 values with scales.

    values: float8_e4m3fn [N, C].
    scales: [ceil(N / R), ceil(C / S)].
    rows_of_scale, columns_of_scale: R and S.
    """

    values: Tensor
    scales: Tensor
    rows_of_scale: int
    columns_of_scale: int

    @property
    def num_rows(self) -> int:
        return self.values.shape[0]

    @property
    def num_columns(self) -> int:
        return self.values.shape[1]

    def dequantised(self, start: int, stop: int) -> Tensor:
        """Returns rows [start, stop) in float32; start is a multiple of `rows_of_scale`."""
        values = self.values[start:stop].to(torch.float32)
        end = ceil_div(stop, self.rows_of_scale)
        scales = self.scales[start // self.rows_of_scale : end].to(torch.float32)
        if self.rows_of_scale > 1:
            scales = scales.repeat_interleave(self.rows_of_scale, 0)[: len(values)]
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.columns_of_scale, 1)[:, : self.num_columns]
        return values.mul_(scales)


@dataclass(frozen=True, slots=True)
class Fp8Matrices:
    """Holds FP8 matrices of one size, such as those of experts.

    values: float8_e4m3fn [E, N, C].
    scales: [E, ceil(N / R), ceil(C / S)].
    rows_of_scale, columns_of_scale: R and S.
    """

    values: Tensor
    scales: Tensor
    rows_of_scale: int
    columns_of_scale: int

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, numbers: Tensor) -> Fp8Matrices:
        """Returns those of these numbers, int64 [P]."""
        return replace(self, values=self.values[numbers], scales=self.scales[numbers])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Returns [E, N, C] in a type. One matrix after another goes through float32."""
        whole = self.values.new_empty(self.values.shape, dtype=dtype)
        for place, values, scales in zip(whole, self.values, self.scales, strict=True):
            matrix = Fp8Matrix(values, scales, self.rows_of_scale, self.columns_of_scale)
            place.copy_(matrix.dequantised(0, len(values)))
        return whole


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """Holds values of 4 bits, of which groups of G columns share a scale and a zero point.

    packed: uint8 [N, C / 2]; see `stages/loading/quantized_forms.py`.
    zeros: uint8 [N, C / G]. scales: [N, C / G].
    """

    packed: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def num_rows(self) -> int:
        return self.packed.shape[0]

    @property
    def num_columns(self) -> int:
        return 2 * self.packed.shape[1]

    @property
    def rows_of_scale(self) -> int:
        return 1

    @property
    def group(self) -> int:
        return self.num_columns // self.zeros.shape[1]

    def dequantised(self, start: int, stop: int) -> Tensor:
        """Returns rows [start, stop) in float32."""
        halves = self.packed[start:stop].view(stop - start, -1, self.group // 2)
        values = torch.cat((halves & 15, halves >> 4), 2).to(torch.float32)
        zeros, scales = (each[start:stop, :, None].to(torch.float32) for each in (self.zeros, self.scales))
        return values.sub_(zeros).mul_(scales).flatten(1)


def fp8_rows_plain(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantises rows [T, C] to FP8, each group of columns by its largest value: the twin of `fp8_rows`.

    Returns float8_e4m3fn [M, C] and their scales, float32 [M, C / group], of which a column lies in one
    piece. M is T rounded up to `ROWS_TOGETHER`, and rows behind T have no meaning.
    """
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS_TOGETHER))
    grouped = padded.reshape(len(padded), rows.shape[1] // group, group)
    scales = grouped.abs().amax(2).to(torch.float32) / FP8_MAX
    values = grouped / torch.where(scales == 0, 1.0, scales)[..., None]
    return values.to(torch.float8_e4m3fn).flatten(1), scales.t().contiguous().t()


def multiply_plain(rows: Tensor, matrix: Fp8Matrix | Int4Matrix, bias: Tensor | None) -> Tensor:
    """Returns [T, N] of rows [T, C]; some rows of the matrix are dequantised at a time. bias: [N]."""
    size = max(1, _PIECE // (matrix.num_columns * matrix.rows_of_scale)) * matrix.rows_of_scale
    out = rows.new_empty(len(rows), matrix.num_rows)
    for start in range(0, matrix.num_rows, size):
        stop = min(start + size, matrix.num_rows)
        weight = matrix.dequantised(start, stop).to(rows.dtype)
        out[:, start:stop] = functional.linear(rows, weight, None if bias is None else bias[start:stop])
    return out
