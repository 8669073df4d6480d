"""Computes attention over a paged KV cache on a GPU. Its twin is `stages.kernels.paged_plain`.

One program takes one *tile* (some new tokens of one segment, times the G query heads of one KV head) and one
*split* of the keys that the tile attends (Dao et al. 2023, "Flash-Decoding"):

    rows of a tile   (token 0, head 0) ... (token 0, head G - 1) (token 1, head 0) ...     padded to BLOCK_M
    keys of a tile   |    split 0    |    split 1    |  split 2 |                          padded to BLOCK_N

With several splits each writes its part and the logarithm of its sum; a second kernel puts them together.
Import this module only where Triton is.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.types import ceil_div
from stages.kernels.tiles import PagedSegments, TileSet
from stages.kernels.tiling import tiling


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _load_keys(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    cache, token, is_key, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Loads keys or values of one head at offsets `token`, [BLOCK_N, BLOCK_D]; zeros where there is none."""
    dim = tl.arange(0, BLOCK_D)
    return tl.load(
        cache + token[:, None] + dim[None, :], mask=is_key[:, None] & (dim < HEAD_DIM)[None, :], other=0.0
    )


@triton.jit
def _absorb(scores, v, highest, total, weighted):  # type: ignore[no-untyped-def] # blocks of numbers
    """Performs one step of the running softmax, float32: scores [BLOCK_M, BLOCK_N], v [BLOCK_N, BLOCK_D]."""
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row that has seen nothing yet: minus infinity less itself is not a number.
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(highest - reference)
    total = total * shrink + tl.sum(weights, 1)
    weighted = weighted * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_highest, total, weighted


@triton.jit(do_not_specialize=["table_stride", "entry_stride", "tiles_each", "num_splits"])  # type: ignore[untyped-decorator] # Triton is untyped
def _attend_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    query,
    keys,
    values,
    out,
    log_sums,
    segments,
    query_starts,
    context_lens,
    block_tables,
    scale_log2,
    table_stride,
    entry_stride,
    tiles_each,
    num_splits,
    query_token_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    out_split_stride,
    out_token_stride,
    sums_split_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    segment = tl.load(segments + tl.program_id(0) // tiles_each)
    first_token = tl.program_id(0) % tiles_each * TOKENS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    query_start = tl.load(query_starts + segment)
    num_new = tl.load(query_starts + segment + 1) - query_start
    context = tl.load(context_lens + segment)

    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (token < num_new)
    last_key = context - num_new + token
    dim = tl.arange(0, BLOCK_D)
    is_value = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    packed = (query_start + token).to(tl.int64)
    place = packed[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + place, mask=is_value, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)

    # The last token of the tile sees the most; a tile past the segment's end sees nothing.
    stop = context - num_new + tl.minimum(first_token + TOKENS, num_new)
    stop = tl.where(first_token < num_new, stop, 0)
    each = tl.cdiv(tl.cdiv(stop, num_splits), BLOCK_N) * BLOCK_N
    low = split * each
    high = tl.minimum(low + each, stop)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        is_key = key < high
        block = tl.load(
            block_tables + segment.to(tl.int64) * table_stride + key // BLOCK_SIZE * entry_stride,
            mask=is_key,
            other=0,
        )
        held = block.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride + kv_head * head_stride
        k = _load_keys(keys, held, is_key, HEAD_DIM, BLOCK_D)
        v = _load_keys(values, held, is_key, HEAD_DIM, BLOCK_D)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        is_seen = is_key[None, :] & (key[None, :] <= last_key[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        highest, total, weighted = _absorb(scores, v, highest, total, weighted)

    divisor = tl.where(total == 0.0, 1.0, total)
    out_place = packed[:, None] * out_token_stride + head[:, None] * HEAD_DIM + dim[None, :]
    if IS_SPLIT:
        out_place += split.to(tl.int64) * out_split_stride
        sums_place = split.to(tl.int64) * sums_split_stride + packed * (out_token_stride // HEAD_DIM) + head
        log_sum = tl.where(total == 0.0, float("-inf"), highest + tl.log2(divisor))
        tl.store(log_sums + sums_place, log_sum, mask=is_row)
    tl.store(out + out_place, (weighted / divisor[:, None]).to(out.dtype.element_ty), mask=is_value)


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator] # Triton is untyped
def _merge_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    parts,
    log_sums,
    out,
    rows,
    num_splits,
    parts_split_stride,
    sums_split_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    packed = tl.load(rows + tl.program_id(0)).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    is_head = head < NUM_HEADS
    is_value = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    sums_place = packed * NUM_HEADS + head
    place = sums_place[:, None] * HEAD_DIM + dim[None, :]
    highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    weighted = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in range(num_splits):
        # The first split is never empty, so `highest` is a number from there on.
        log_sum = tl.load(log_sums + split * sums_split_stride + sums_place, mask=is_head, other=0.0)
        part = tl.load(parts + split * parts_split_stride + place, mask=is_value, other=0.0)
        new_highest = tl.maximum(highest, log_sum)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(log_sum - new_highest)
        total = total * shrink + weight
        weighted = weighted * shrink[:, None] + part * weight[:, None]
        highest = new_highest
    tl.store(out + place, (weighted / total[:, None]).to(out.dtype.element_ty), mask=is_value)


_LEAST_KEYS_PER_SPLIT = 256
_MOST_SPLITS = 32
_HEADS_PER_MERGE = 8


def num_splits(num_programs: int, max_context: int, num_processors: int) -> int:
    """Returns into how many parts to split the keys: enough to busy the device twice, none of them tiny."""
    wanted = ceil_div(2 * num_processors, num_programs)
    useful = ceil_div(max_context, _LEAST_KEYS_PER_SPLIT)
    return max(1, min(wanted, useful, _MOST_SPLITS))


def attend_tiles(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    segments: PagedSegments,
    tiles: TileSet,
    out: Tensor,
    *,
    scale: float,
    num_processors: int,
) -> None:
    """Fills the rows of `tiles` in out [T, Hq, D], contiguous and of the query's dtype.

    query: [T, Hq, D], channels contiguous.
    key_cache, value_cache: [num_blocks, block_size, Hkv, D], of the same strides; blocks may lie apart.
    num_processors: of the device. Sums are float32; float32 inputs are multiplied as IEEE has it.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    tile = tiling(tiles.max_new, num_heads // num_kv_heads, head_dim, query.dtype)
    tiles_each = ceil_div(tiles.max_new, tile.tokens)
    num_tiles = len(tiles.segments) * tiles_each
    splits = num_splits(num_tiles * num_kv_heads, tiles.max_context, num_processors)
    parts, log_sums = out, out
    if splits > 1:
        parts = torch.empty(splits, *query.shape, dtype=torch.float32, device=query.device)
        log_sums = torch.empty(splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
    _attend_kernel[(num_tiles, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        parts,
        log_sums,
        tiles.segments,
        segments.query_starts,
        segments.context_lens,
        segments.block_tables,
        scale * 1.4426950408889634,  # exp(x) = 2 ^ (x log2(e))
        *segments.block_tables.stride(),
        tiles_each,
        splits,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        num_rows * num_heads * head_dim,
        num_heads * head_dim,
        num_rows * num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
        TOKENS=tile.tokens,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=tile.block_d,
        IS_SPLIT=splits > 1,
        UPCAST=not query.is_cuda,  # the interpreter multiplies bfloat16 as if it were integers
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _merge(parts, log_sums, tiles.rows, out, tile.block_d)


def _merge(parts: Tensor, log_sums: Tensor, rows: Tensor, out: Tensor, block_d: int) -> None:
    splits, _, num_heads, head_dim = parts.shape
    _merge_kernel[(len(rows), ceil_div(num_heads, _HEADS_PER_MERGE))](
        parts,
        log_sums,
        out,
        rows,
        splits,
        parts.stride(0),
        log_sums.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=_HEADS_PER_MERGE,
        BLOCK_D=block_d,
        num_warps=4,
    )
