"""Norms and rotates queries and keys on a GPU, and writes keys and values to the cache, by one kernel.

One program for each head of a token. Import this module only where Triton is. The twin in plain torch:
`norm_rotate_write` in `stages/decoder/operations.py`.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.encoders.kernels.dispatch import check_contiguous


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
        target = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + at
        if head < NUM_HEADS + NUM_KV_HEADS:
            key = key_cache + target + (head - NUM_HEADS) * 2 * HALF
            tl.store(key, first, mask=inside)
            tl.store(key + HALF, second, mask=inside)
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
    caches: of keys and values, [num_blocks, block_size, Hkv, D], of the same dtype and strides.
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
