"""Writes keys and values to their slots on a GPU, and copies whole blocks.

write_slots          one program for each token
norm_rotate_write    norms and rotates queries and keys before, one program for each head of a token; the
                     twin is `norm_rotate_write` in `stages/decoder/operations.py`
copy_blocks          copies blocks in any order; the twin is `KVPool.copy`, block by block

A copy for each run of blocks that follow each other is a launch for each: 2,048 blocks in no order took 24 ms
on an H100, 12 us each, whatever their size. So one kernel copies all. Import this only where Triton is.
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
def _store_scaled(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    values, rows, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes a head's values as the scaled row at `rows`; the twin is `scaled`."""
    dim = tl.arange(0, BLOCK)
    inside = dim < HEAD_DIM
    value = tl.load(values + dim, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(value), 0) / 127.0
    code = tl.floor(value / tl.where(scale == 0.0, 1.0, scale) + 0.5)
    tl.store(rows + dim, code.to(tl.int8), mask=inside)
    tl.store((rows + HEAD_DIM).to(tl.pointer_type(tl.float32)), scale)


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
    BLOCK_D: tl.constexpr,
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
        tl.store(key_cache + target + index, key, mask=inside)
        if value_cache.dtype.element_ty != tl.int8:
            value = tl.load(values + token * value_token_stride + head * value_head_stride + dim, mask=inside)
            tl.store(value_cache + target + index, value, mask=inside)
    if value_cache.dtype.element_ty == tl.int8:
        for kv_head in range(NUM_HEADS):
            row = value_cache + (target // HEAD_DIM + kv_head) * (HEAD_DIM + 4)
            place = values + token * value_token_stride + kv_head * value_head_stride
            _store_scaled(place, row, HEAD_DIM, BLOCK_D)


def write_slots(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes keys, values [T, Hkv, D], channels contiguous, to slots int64 [T]. Twin: `index_put_`.

    key_cache, value_cache: [num_blocks, block_size, Hkv, D], of the same dtype and strides. Blocks may lie
    apart; the heads of a token are contiguous. Values may have scaled rows, in the same order as keys.
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
        BLOCK_D=int(triton.next_power_of_2(head_dim)),
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


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _norm_rotate_write_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    qkv,
    query_weight,
    key_weight,
    cos,
    sin,
    key_cache,
    value_cache,
    slots,
    token_stride,
    block_stride,
    slot_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    place = qkv + token * token_stride + head * 2 * HALF + at
    first = tl.load(place, mask=inside, other=0.0)
    second = tl.load(place + HALF, mask=inside, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if HAS_NORM:
            weight = query_weight
            if head >= NUM_HEADS:
                weight = key_weight
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
            a = a * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
            b = b * scale * tl.load(weight + HALF + at, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + token * HALF + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + token * 2 * HALF + HALF + at, mask=inside, other=0.0).to(tl.float32)
        first = (a * c - b * s).to(qkv.dtype.element_ty)
        second = (b * c + a * s).to(qkv.dtype.element_ty)
        tl.store(place, first, mask=inside)
        tl.store(place + HALF, second, mask=inside)
    if head >= NUM_HEADS:
        slot = tl.load(slots + token).to(tl.int64)
        start = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
        target = start + at
        if head < NUM_HEADS + NUM_KV_HEADS:
            key = key_cache + target + (head - NUM_HEADS) * 2 * HALF
            tl.store(key, first, mask=inside)
            tl.store(key + HALF, second, mask=inside)
        elif value_cache.dtype.element_ty == tl.int8:
            row = start // (2 * HALF) + head - NUM_HEADS - NUM_KV_HEADS
            values = qkv + token * token_stride + head * 2 * HALF
            _store_scaled(values, value_cache + row * (2 * HALF + 4), 2 * HALF, 2 * BLOCK)
        else:
            value = value_cache + target + (head - NUM_HEADS - NUM_KV_HEADS) * 2 * HALF
            tl.store(value, first, mask=inside)
            tl.store(value + HALF, second, mask=inside)


def norm_rotate_write_fused(
    heads: Tensor,
    num_heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
) -> None:
    """Norms and rotates queries and keys in place, and writes keys and values to slots.

    heads: [T, Hq + 2 Hkv, D], the heads of a token contiguous. num_heads: Hq, Hkv.
    norms: weights of queries and keys, [D] each.
    cos: [T, D / 2]. sin: [T, 2, D / 2], of which the second half is read.
    caches: of keys and values, as `write_slots` has them.
    slot_mapping: int64 [T].
    Raises ValueError for rotations that are not in one piece.
    """
    check_contiguous(cos, sin, *(norms or ()))
    num_tokens, num_all, dim = heads.shape
    query_weight, key_weight = norms or (heads, heads)
    key_cache, value_cache = caches
    _norm_rotate_write_kernel[(num_tokens, num_all)](
        heads,
        query_weight,
        key_weight,
        cos,
        sin,
        key_cache,
        value_cache,
        slot_mapping,
        heads.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        eps,
        NUM_HEADS=num_heads[0],
        NUM_KV_HEADS=num_heads[1],
        HALF=dim // 2,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK=int(triton.next_power_of_2(dim // 2)),
        HAS_NORM=norms is not None,
        num_warps=1,
    )
