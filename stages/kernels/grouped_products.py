"""Multiplies rows by the matrices of the experts that they chose, on a GPU: those of all experts at once.

    chosen  [T, K]       a pair is a row and one of its experts
    order   | pairs of expert 0 | of 3 |      of 5       |    sorted, each program one expert's
    tiles   [  0  )[  1  )[ 2 )  [ 3 ) [  4  )[  5  )[6)      BLOCK_M pairs at most; none of expert 1, 2 and 4
    hidden  [T * K, I]   of pairs in this order: gate and up of a tile, activated
    added   [T * K, C]   of pairs as they came, times their weights; those of a row are added up

How many tiles there are is known on the device alone. So there are as many places for tiles as may be needed,
and programs of empty ones end at once. An expert that nobody chose is not read. FP8 is dequantised inside of
the product, as in `quantized_products`. Tiles are not tuned on a GPU.

Import this module only where Triton is. The twin in plain torch: `experts_plain` in `decoder/experts.py`.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.encoders.kernels.dispatch import check_contiguous
from epd.stages.kernels.quantized_plain import Fp8Matrices
from epd.stages.kernels.quantized_products import FEW_ROWS, Tile, _float_of_fp8, tile_of
from epd.types import ceil_div

_ENTRY = 3  # of a tile: its expert, its first pair, and the one behind its last
_FEW_PAIRS, _MANY_PAIRS = 512, 4096  # that are looked at together
_SCALE_SIZES = ("scale_rows", "scale_columns", "rows_of_scale", "columns_of_scale")


def num_few_pairs(num_experts: int) -> int:
    """Returns up to how many pairs have the tiles of decodes, of which each expert has one or less."""
    return FEW_ROWS * num_experts


@triton.jit(do_not_specialize=["num_pairs", "by_pair"])  # type: ignore[untyped-decorator] # Triton is untyped
def _arrange_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    chosen, order, tiles, num_pairs, by_pair, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), tl.int32)
    mine = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        each = tl.load(chosen + begin + at, mask=begin + at < num_pairs, other=2**31 - 1)
        earlier += (each < expert).to(tl.int32)
        mine += (each == expert).to(tl.int32)
    first = tl.sum(earlier, 0)
    stop = first + tl.sum(mine, 0)
    place = first
    for begin in range(0, num_pairs, BLOCK):
        each = tl.load(chosen + begin + at, mask=begin + at < num_pairs, other=2**31 - 1)
        is_mine = each == expert
        later = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(order + place + later - 1, begin + at, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), 0)
    # Places of tiles are those of pairs, or of whole tiles of all pairs and one more for each expert.
    tile = tl.where(by_pair > 0, first, first // BLOCK_M + expert)
    last = tl.where(by_pair > 0, stop, stop // BLOCK_M + expert + 1)
    for begin in range(tile, last, BLOCK):
        begins = first + (begin + at - tile) * BLOCK_M
        entry = tiles + (begin + at) * 3
        inside = begin + at < last
        tl.store(entry, tl.zeros((BLOCK,), tl.int32) + expert, mask=inside)
        tl.store(entry + 1, begins, mask=inside)
        tl.store(entry + 2, tl.minimum(begins + BLOCK_M, stop), mask=inside)


@triton.jit
def _scales_at(scales, scale_rows, scale_columns, rows_of_scale, expert, n):  # type: ignore[no-untyped-def]
    """Returns where the first scale of each row n of an expert's matrix lies."""
    return scales + (expert * scale_rows + n // rows_of_scale) * scale_columns


@triton.jit(do_not_specialize=["top_k", *_SCALE_SIZES])  # type: ignore[untyped-decorator] # Triton is untyped
def _gate_up_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    rows,
    gate_up,
    order,
    tiles,
    hidden,
    top_k,
    num_in,
    width,
    row_stride,
    scales,
    scale_rows,
    scale_columns,
    rows_of_scale,
    columns_of_scale,
    IS_GELU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 3
    expert, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first >= stop:
        return
    place = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_out = (place < stop)[:, None], (n < width)[:, None]
    row = tl.load(order + place, mask=place < stop, other=0) // top_k
    row_at = rows + row[:, None].to(tl.int64) * row_stride + k[None, :]
    gate_at = gate_up + (expert * 2 * width + n)[:, None] * num_in + k[None, :]
    up_at = gate_at + width * num_in
    gate_scale_at = _scales_at(scales, scale_rows, scale_columns, rows_of_scale, expert, n)
    up_scale_at = _scales_at(scales, scale_rows, scale_columns, rows_of_scale, expert, width + n)
    gates = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    ups = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, num_in, BLOCK_K):
        is_column = (start + k < num_in)[None, :]
        values = tl.load(row_at + start, mask=is_row & is_column, other=0.0)
        gate = tl.load(gate_at + start, mask=is_out & is_column, other=0)
        up = tl.load(up_at + start, mask=is_out & is_column, other=0)
        if UPCAST:
            values = values.to(tl.float32)
        if IS_FP8:
            gate, up = _float_of_fp8(gate), _float_of_fp8(up)
            gate_scale = tl.load(gate_scale_at + start // columns_of_scale, mask=n < width, other=0.0)
            up_scale = tl.load(up_scale_at + start // columns_of_scale, mask=n < width, other=0.0)
            product = tl.dot(values, tl.trans(gate.to(values.dtype)), input_precision="ieee")
            gates += product * gate_scale.to(tl.float32)[None, :]
            product = tl.dot(values, tl.trans(up.to(values.dtype)), input_precision="ieee")
            ups += product * up_scale.to(tl.float32)[None, :]
        else:
            gates = tl.dot(values, tl.trans(gate.to(values.dtype)), gates, input_precision="ieee")
            ups = tl.dot(values, tl.trans(up.to(values.dtype)), ups, input_precision="ieee")
    turned = gates
    if IS_GELU:  # with tanh(x) = 2 sigmoid(2 x) - 1
        turned = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    activated = gates / (1.0 + tl.exp(-turned)) * ups
    out_at = hidden + place[:, None].to(tl.int64) * width + n[None, :]
    tl.store(out_at, activated.to(hidden.dtype.element_ty), mask=is_row & (n < width)[None, :])


@triton.jit(do_not_specialize=_SCALE_SIZES)  # type: ignore[untyped-decorator] # Triton is untyped
def _down_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    hidden,
    down,
    weights,
    order,
    tiles,
    added,
    width,
    num_out,
    scales,
    scale_rows,
    scale_columns,
    rows_of_scale,
    columns_of_scale,
    BLOCK_N: tl.constexpr,
    IS_FP8: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * 3
    expert, first, stop = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first >= stop:
        return
    place = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_out = (place < stop)[:, None], (n < num_out)[:, None]
    row_at = hidden + place[:, None].to(tl.int64) * width + k[None, :]
    value_at = down + (expert * num_out + n)[:, None] * width + k[None, :]
    scale_at = _scales_at(scales, scale_rows, scale_columns, rows_of_scale, expert, n)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        is_column = (start + k < width)[None, :]
        values = tl.load(row_at + start, mask=is_row & is_column, other=0.0)
        matrix = tl.load(value_at + start, mask=is_out & is_column, other=0)
        if UPCAST:
            values = values.to(tl.float32)
        if IS_FP8:
            matrix = _float_of_fp8(matrix)
            scale = tl.load(scale_at + start // columns_of_scale, mask=n < num_out, other=0.0)
            product = tl.dot(values, tl.trans(matrix.to(values.dtype)), input_precision="ieee")
            total += product * scale.to(tl.float32)[None, :]
        else:
            total = tl.dot(values, tl.trans(matrix.to(values.dtype)), total, input_precision="ieee")
    pair = tl.load(order + place, mask=place < stop, other=0)
    total *= tl.load(weights + pair, mask=place < stop, other=0.0).to(tl.float32)[:, None]
    out_at = added + pair[:, None].to(tl.int64) * num_out + n[None, :]
    tl.store(out_at, total.to(added.dtype.element_ty), mask=is_row & (n < num_out)[None, :])


def experts_fused(
    rows: Tensor,
    matrices: tuple[Tensor | Fp8Matrices, Tensor | Fp8Matrices],
    chosen: Tensor,
    weights: Tensor,
    *,
    is_gelu: bool,
) -> Tensor:
    """Returns [T, C] of rows [T, C] as `experts_plain` does, its twin. Nothing waits for the device.

    matrices: gate and up [E, 2 I, C], and down [E, C, I], each in one piece; both in FP8, or none.
    Raises ValueError for others, such as those of files that have them turned: see `in_layout`.
    """
    (gate_up, *of_gate_up), (down, *of_down) = map(_read, matrices)
    check_contiguous(gate_up, down)
    num_experts, num_out, width = down.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_pairs, is_fp8 = chosen.numel(), isinstance(matrices[0], Fp8Matrices)
    tile = tile_of(ceil_div(num_pairs, num_experts), rows.dtype)
    hidden, added = rows.new_empty(num_pairs, width), rows.new_empty(*chosen.shape, num_out)
    if num_pairs:
        order, tiles = _arranged(chosen.contiguous(), num_experts, tile)
        # The interpreter multiplies no bfloat16.
        options: dict[str, int] = {"IS_FP8": is_fp8, "UPCAST": not rows.is_cuda}
        options |= {"BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k}
        options |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        # Two matrices that are dequantised at once, of 64 outputs each, spill on sm_80.
        block = min(tile.block_n, 32) if is_fp8 else tile.block_n
        _gate_up_kernel[(ceil_div(width, block), len(tiles))](
            rows,
            gate_up,
            order,
            tiles,
            hidden,
            chosen.shape[1],
            num_out,
            width,
            rows.stride(0),
            *of_gate_up,
            IS_GELU=is_gelu,
            BLOCK_N=block,
            **options,
        )
        _down_kernel[(ceil_div(num_out, tile.block_n), len(tiles))](
            hidden,
            down,
            weights.contiguous(),
            order,
            tiles,
            added,
            width,
            num_out,
            *of_down,
            BLOCK_N=tile.block_n,
            **options,
        )
    return added.sum(1)


def _read(matrices: Tensor | Fp8Matrices) -> tuple[Tensor, Tensor, int, int, int, int]:
    """Returns values, in bytes if in FP8, their scales, which are not read if not, and `_SCALE_SIZES`."""
    if isinstance(matrices, Tensor):
        return matrices, matrices, 1, 1, 1, 1
    scales = matrices.scales.contiguous()
    values = matrices.values.view(torch.uint8)
    return values, scales, *scales.shape[1:], matrices.rows_of_scale, matrices.columns_of_scale


def _arranged(chosen: Tensor, num_experts: int, tile: Tile) -> tuple[Tensor, Tensor]:
    """Returns pairs sorted by expert, int32 [T * K], and places of tiles, int32 [N, 3]."""
    num_pairs = chosen.numel()
    num_whole = num_pairs // tile.block_m + num_experts
    order = chosen.new_empty(num_pairs, dtype=torch.int32)
    tiles = chosen.new_empty(min(num_pairs, num_whole), _ENTRY, dtype=torch.int32)
    block = _FEW_PAIRS if num_pairs <= num_few_pairs(num_experts) else _MANY_PAIRS
    _arrange_kernel[(num_experts,)](
        chosen,
        order,
        tiles,
        num_pairs,
        int(num_pairs <= num_whole),
        BLOCK_M=tile.block_m,
        BLOCK=block,
        num_warps=block // _FEW_PAIRS,
    )
    return order, tiles
