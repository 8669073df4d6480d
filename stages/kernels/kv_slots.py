"""Moves keys and values by slot on a GPU: one program for each token and plane.

A *plane* is the keys or the values of one layer. Import this module only where Triton is.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_MOST_VALUES = 1024  # of a token that a program moves at a time


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _write_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(slots + token).to(tl.int64) * slot_stride
    for start in range(0, NUM_HEADS * HEAD_DIM, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < NUM_HEADS * HEAD_DIM
        head = index // HEAD_DIM
        dim = index % HEAD_DIM
        key = tl.load(keys + token * key_token_stride + head * key_head_stride + dim, mask=inside)
        value = tl.load(values + token * value_token_stride + head * value_head_stride + dim, mask=inside)
        tl.store(key_cache + target + index, key, mask=inside)
        tl.store(value_cache + target + index, value, mask=inside)


def write_slots(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes keys, values [T, Hkv, D], channels contiguous, to slots int64 [T]. Twin: `index_copy_`.

    key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous, of the same dtype.
    """
    num_tokens, num_heads, head_dim = keys.shape
    _write_kernel[(num_tokens,)](
        keys,
        values,
        key_cache,
        value_cache,
        slot_mapping,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        key_cache.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK=_block(num_heads * head_dim),
    )


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _move_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    planes,
    rows,
    slots,
    plane_stride,
    rows_plane_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GATHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at_slot = planes + plane * plane_stride + slot * WIDTH
    at_row = rows + plane * rows_plane_stride + row * WIDTH
    for start in range(0, WIDTH, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < WIDTH
        if IS_GATHER:
            tl.store(at_row + index, tl.load(at_slot + index, mask=inside), mask=inside)
        else:
            tl.store(at_slot + index, tl.load(at_row + index, mask=inside), mask=inside)


def gather_slots(planes: Tensor, slots: Tensor) -> Tensor:
    """Reads planes [P, num_slots, W], contiguous, at slots int64 [K]: [P, K, W]. Twin: `index_select`."""
    rows = torch.empty(planes.shape[0], len(slots), planes.shape[2], dtype=planes.dtype, device=planes.device)
    _move(planes, rows, slots, is_gather=True)
    return rows


def scatter_slots(planes: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Writes rows [P, K, W] at slots int64 [K] of planes [P, num_slots, W], all contiguous.

    Twin: `index_copy_`.
    """
    _move(planes, rows, slots, is_gather=False)


def _move(planes: Tensor, rows: Tensor, slots: Tensor, *, is_gather: bool) -> None:
    num_planes, num_rows, width = rows.shape
    _move_kernel[(num_rows, num_planes)](
        planes,
        rows,
        slots,
        planes.stride(0),
        rows.stride(0),
        WIDTH=width,
        BLOCK=_block(width),
        IS_GATHER=is_gather,
    )


def _block(width: int) -> int:
    return min(_MOST_VALUES, int(triton.next_power_of_2(width)))
