"""Multiplies rows by quantised matrices on a GPU, whose tiles are dequantised inside of the product.

    rows [T, C]   x   matrix [N, C]    a program has BLOCK_M rows and BLOCK_N outputs, and goes along C
    FP8       BLOCK_K columns at a time, and their scale is that of a block, or of the row
    4 bits    BLOCK_K bytes at a time, of one group: a column of its first half in their low bits, one of its
              second half in the high bits

    rows      a program quantises a row, or a group of its columns, for torch's own FP8 products

Products of values that are not scaled yet are added up in float32, and then scaled: FP8 values, and those of
4 bits less their zero point, are exact in 16 bits. Tiles are not tuned on a GPU.

Import this module only where Triton is. The twins in plain torch: `stages/kernels/quantized_plain.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.stages.kernels.quantized_plain import ROWS_TOGETHER, Fp8Matrix, Int4Matrix
from epd.types import ceil_div

# Of at most this many rows the tile of a decode is not mostly padding; tl.dot takes no fewer.
FEW_ROWS = 16
_ROW_BLOCK = 2048  # values of a row that a program quantises at a time


@dataclass(frozen=True, slots=True)
class Tile:
    """Holds the sizes of a tile of rows, outputs and columns, and how it is computed."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_of(num_rows: int, dtype: torch.dtype) -> Tile:
    """Returns the tiles of so many rows."""
    if dtype.itemsize > 2:  # IEEE products have no tensor cores: they are unrolled, and larger tiles spill
        return Tile(FEW_ROWS, 32, 32, 4, 2)
    if num_rows <= FEW_ROWS:
        return Tile(FEW_ROWS, 32, 128, 4, 4)
    return Tile(64, 64, 64, 4, 3)


@triton.jit
def _float_of_fp8(values):  # type: ignore[no-untyped-def] # a tile of bytes
    """Reads bytes as float8_e4m3fn. Not every GPU can; float16 has the same fields, and another bias."""
    wide = values.to(tl.int16)
    fields = ((wide & 128) << 8) | ((wide & 127) << 7)
    return fields.to(tl.float16, bitcast=True) * 256.0


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _store(  # type: ignore[no-untyped-def] # arguments are pointers, tiles and numbers
    out, total, bias, m, n, num_rows, num_out, HAS_BIAS: tl.constexpr
):
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    inside = (m < num_rows)[:, None] & (n < num_out)[None, :]
    place = out + m[:, None].to(tl.int64) * num_out + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "scale_stride", "rows_of_scale", "columns_of_scale"])  # type: ignore[untyped-decorator] # Triton is untyped
def _fp8_product_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows,
    values,
    scales,
    bias,
    out,
    num_rows,
    num_out,
    num_in,
    row_stride,
    scale_stride,
    rows_of_scale,
    columns_of_scale,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_at = rows + m[:, None].to(tl.int64) * row_stride + k[None, :]
    value_at = values + n[:, None].to(tl.int64) * num_in + k[None, :]
    scale_at = scales + n // rows_of_scale * scale_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_in, BLOCK_K):
        is_column = (start + k < num_in)[None, :]
        tile = tl.load(row_at + start, mask=(m < num_rows)[:, None] & is_column, other=0.0)
        if UPCAST:
            tile = tile.to(tl.float32)
        weight = tl.load(value_at + start, mask=(n < num_out)[:, None] & is_column, other=0)
        weight = _float_of_fp8(weight).to(tile.dtype)
        scale = tl.load(scale_at + start // columns_of_scale, mask=n < num_out, other=0.0)
        product = tl.dot(tile, tl.trans(weight), input_precision="ieee")
        total += product * scale.to(tl.float32)[None, :]
    _store(out, total, bias, m, n, num_rows, num_out, HAS_BIAS)


def fp8_product(rows: Tensor, matrix: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """Returns [T, N] of rows [T, C]. bias: [N]."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (num_rows, num_in), num_out = rows.shape, matrix.num_rows
    out = rows.new_empty(num_rows, num_out)
    tile = tile_of(num_rows, rows.dtype)
    if num_rows:
        _fp8_product_kernel[(ceil_div(num_out, tile.block_n), ceil_div(num_rows, tile.block_m))](
            rows,
            matrix.values.view(torch.uint8),
            matrix.scales,
            out if bias is None else bias,
            out,
            num_rows,
            num_out,
            num_in,
            rows.stride(0),
            matrix.scales.stride(0),
            matrix.rows_of_scale,
            matrix.columns_of_scale,
            HAS_BIAS=bias is not None,
            UPCAST=not rows.is_cuda,  # the interpreter multiplies bfloat16 as if it were integers
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator] # Triton is untyped
def _fp8_rows_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows, values, scales, num_rows, num_in, row_stride, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = rows + row * row_stride + group * GROUP
    target = values + row * num_in + group * GROUP
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, GROUP, BLOCK):
        value = tl.load(source + start + k, mask=start + k < GROUP, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.math.div_rn(tl.max(largest, 0), 448.0)
    tl.store(scales + group * num_rows + row, scale)
    scale = tl.where(scale == 0.0, 1.0, scale)
    for start in range(0, GROUP, BLOCK):
        value = tl.load(source + start + k, mask=start + k < GROUP, other=0.0).to(tl.float32)
        value = tl.math.div_rn(value, scale).to(tl.float8e4nv)
        tl.store(target + start + k, value, mask=start + k < GROUP)


def fp8_rows(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantises rows [T, C], each group of columns by its largest value; needs compute capability 8.9.

    Returns FP8 values and scales as `fp8_rows_plain` does, its twin.
    """
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows, num_in = ceil_div(len(rows), ROWS_TOGETHER) * ROWS_TOGETHER, rows.shape[1]
    values = rows.new_empty(num_rows, num_in, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(num_in // group, num_rows, dtype=torch.float32)
    if len(rows):
        _fp8_rows_kernel[(len(rows), num_in // group)](
            rows,
            values,
            scales,
            num_rows,
            num_in,
            rows.stride(0),
            GROUP=group,
            BLOCK=min(_ROW_BLOCK, int(triton.next_power_of_2(group))),
            num_warps=1 if group <= _ROW_BLOCK // 8 else 4,
        )
    return values, scales.t()


@triton.jit(do_not_specialize=["num_rows", "num_groups"])  # type: ignore[untyped-decorator] # Triton is untyped
def _int4_product_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows,
    packed,
    zeros,
    scales,
    bias,
    out,
    num_rows,
    num_out,
    num_groups,
    row_stride,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_at = rows + m[:, None].to(tl.int64) * row_stride + k[None, :]
    packed_at = packed + n[:, None].to(tl.int64) * num_groups * HALF + k[None, :]
    group_at = n.to(tl.int64) * num_groups
    is_row = (m < num_rows)[:, None]
    is_out = n < num_out
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_groups * HALF, BLOCK_K):
        group = start // HALF
        first = tl.load(row_at + group * HALF + start, mask=is_row, other=0.0)
        second = tl.load(row_at + group * HALF + start + HALF, mask=is_row, other=0.0)
        if UPCAST:
            first = first.to(tl.float32)
            second = second.to(tl.float32)
        both = tl.load(packed_at + start, mask=is_out[:, None], other=0)
        zero = tl.load(zeros + group_at + group, mask=is_out, other=0).to(tl.float32)[:, None]
        scale = tl.load(scales + group_at + group, mask=is_out, other=0.0).to(tl.float32)
        low = ((both & 15).to(tl.float32) - zero).to(first.dtype)
        high = ((both >> 4).to(tl.float32) - zero).to(first.dtype)
        product = tl.dot(first, tl.trans(low), input_precision="ieee")
        product = tl.dot(second, tl.trans(high), product, input_precision="ieee")
        total += product * scale[None, :]
    _store(out, total, bias, m, n, num_rows, num_out, HAS_BIAS)


def int4_product(rows: Tensor, matrix: Int4Matrix, bias: Tensor | None) -> Tensor:
    """Returns [T, N] of rows [T, C]. bias: [N]."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_rows, num_out = len(rows), matrix.num_rows
    out = rows.new_empty(num_rows, num_out)
    tile = tile_of(num_rows, rows.dtype)
    if num_rows:
        _int4_product_kernel[(ceil_div(num_out, tile.block_n), ceil_div(num_rows, tile.block_m))](
            rows,
            matrix.packed,
            matrix.zeros,
            matrix.scales,
            out if bias is None else bias,
            out,
            num_rows,
            num_out,
            matrix.zeros.shape[1],
            rows.stride(0),
            HAS_BIAS=bias is not None,
            UPCAST=not rows.is_cuda,  # the interpreter multiplies bfloat16 as if it were integers
            HALF=matrix.group // 2,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=min(tile.block_k, matrix.group) // 2,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out
