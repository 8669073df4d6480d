"""Writes keys and values to their slots on a GPU, one program for each token, and copies whole blocks.

A copy for each run of blocks that follow each other is a launch for each: 2,048 blocks in no order took 24 ms
on an H100, 12 us each, whatever their size. So one kernel copies all; its twin is `KVPool.copy`, block by
block. Import this module only where Triton is.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.encoders.kernels.dispatch import check_contiguous

_WORDS = 4096  # of 4 bytes, that a program copies
_MOST_VALUES = 1024  # of a token that a program writes at a time


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
    block_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    target = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
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
    """Writes keys, values [T, Hkv, D], channels contiguous, to slots int64 [T]. Twin: `index_put_`.

    key_cache, value_cache: [num_blocks, block_size, Hkv, D], of the same dtype and strides. Blocks may lie
    apart; the heads of a token are contiguous.
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
        key_cache.stride(0),
        key_cache.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK=_block(num_heads * head_dim),
    )


def _block(width: int) -> int:
    return min(_MOST_VALUES, int(triton.next_power_of_2(width)))


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _copy_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    source,
    target,
    source_blocks,
    target_blocks,
    num_words,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    read = tl.load(source_blocks + number) * num_words
    written = tl.load(target_blocks + number) * num_words
    tl.store(target + written + at, tl.load(source + read + at, mask=inside), mask=inside)


def copy_blocks_fused(source: Tensor, target: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
    """Copies blocks of `source` to blocks of `target`, [blocks, ...], each block in one piece, both alike.

    source_blocks, target_blocks: int64 [N], on the device, none of them in both if both are one pool.
    """
    check_contiguous(source, target)
    words, to = (each.flatten(1).view(torch.int32) for each in (source, target))
    num_words = words.shape[1]
    grid = (len(source_blocks), int(triton.cdiv(num_words, _WORDS)))
    _copy_kernel[grid](words, to, source_blocks, target_blocks, num_words, BLOCK=_WORDS, num_warps=8)
