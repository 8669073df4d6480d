"""Computes attention over a paged KV cache on a GPU. Its twin is `epd.stages.kernels.tiles`.

One program takes one *item* of the host's work list: a tile (some new tokens, times the G query heads of one
KV head) and some of the keys that it attends. The tokens are of one segment, or of several that share these.

    rows of a tile   (token 0, head 0) ... (token 0, head G - 1) (token 1, head 0) ...     padded to BLOCK_M
    keys of a tile   |    item i     |   item i + 1  | item i + 2 |                        padded to BLOCK_N

Where a tile has several items each writes its part and the logarithm of its sum; a second kernel merges them.
Import this module only where Triton is.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from epd.stages.kernels.scaled_values import is_scaled
from epd.stages.kernels.tiles import PagedWork
from epd.stages.kernels.tiling import LEAST_ROWS, next_power_of_2
from epd.types import ceil_div


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _load_keys(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    cache, token, is_key, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ARE_ALL: tl.constexpr
):
    """Loads keys or values of one head at offsets `token`, [BLOCK_N, BLOCK_D]; zeros where there is none."""
    dim = tl.arange(0, BLOCK_D)
    place = cache + token[:, None] + dim[None, :]
    if ARE_ALL and HEAD_DIM == BLOCK_D:
        loaded = tl.load(place)
    elif ARE_ALL:
        loaded = tl.load(place, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        loaded = tl.load(place, mask=is_key[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    return loaded


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _load_scaled(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    cache,
    row,
    is_key,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ARE_ALL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Loads values of scaled rows, [BLOCK_N, BLOCK_D]; zeros where there is none."""
    start = row * (HEAD_DIM + 4)
    codes = _load_keys(cache, start, is_key, HEAD_DIM, BLOCK_D, ARE_ALL)
    scales = (cache + start + HEAD_DIM).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales, mask=is_key, other=0.0)
    return codes.to(DTYPE) * scale.to(DTYPE)[:, None]


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


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _attend_keys(  # type: ignore[no-untyped-def] # arguments are pointers, numbers and blocks of numbers
    state,
    q,
    keys,
    values,
    start,
    high,
    last_key,
    first_key,
    first_last,
    ahead,
    is_marked,
    blocks_of_table,
    entry_stride,
    block_stride,
    slot_stride,
    head_start,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
    IS_SEEN: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
):
    """Performs one step of a tile, from key `start` on. IS_SEEN: every row sees all of its BLOCK_N keys.

    HAS_MARKS: rows that `is_marked` see keys behind `first_last` that are marked too, at `ahead` and the key.
    """
    highest, total, weighted = state
    key = start + tl.arange(0, BLOCK_N)
    is_key = key < high
    entry = blocks_of_table + key // BLOCK_SIZE * entry_stride
    block = tl.load(entry) if IS_SEEN else tl.load(entry, mask=is_key, other=0)
    held = block.to(tl.int64) * block_stride + key % BLOCK_SIZE * slot_stride + head_start
    k = _load_keys(keys, held, is_key, HEAD_DIM, BLOCK_D, IS_SEEN)
    if values.dtype.element_ty == tl.int8:
        row = block.to(tl.int64) * (block_stride // HEAD_DIM) + key % BLOCK_SIZE * (slot_stride // HEAD_DIM)
        row += head_start // HEAD_DIM
        v = _load_scaled(values, row, is_key, HEAD_DIM, BLOCK_D, IS_SEEN, q.dtype)
    else:
        v = _load_keys(values, held, is_key, HEAD_DIM, BLOCK_D, IS_SEEN)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if not IS_SEEN:
        is_seen = is_key[None, :] & (key[None, :] <= last_key[:, None])
        if HAS_MARKS:
            mark = tl.load(ahead + key, mask=is_key & (key > first_last), other=0)
            is_seen = is_seen | (is_marked[:, None] & (mark != 0)[None, :])
        if IS_WINDOWED:
            is_seen = is_seen & (key[None, :] >= first_key[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    return _absorb(scores, v, highest, total, weighted)


@triton.jit(do_not_specialize=["table_stride", "entry_stride"])  # type: ignore[untyped-decorator] # Triton is untyped
def _attend_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    query,
    keys,
    values,
    out,
    parts,
    log_sums,
    items,
    rows,
    marks,
    block_tables,
    scale_log2,
    table_stride,
    entry_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    out_token_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
    LEAST_TALL: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
):
    # The last first: of a chunk these attend most keys, and would be waited for at the end.
    item = items + (tl.num_programs(0) - 1 - tl.program_id(0)) * 8
    table = tl.load(item)
    first_row = tl.load(item + 1)
    num_rows = tl.load(item + 2)
    low = tl.load(item + 4)
    high = tl.load(item + 5)
    kv_head = tl.program_id(1)

    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (token < num_rows)
    first_last = tl.load(item + 3)
    last_key = first_last + token
    first_key = token
    if IS_WINDOWED:
        first_key += tl.load(item + 6)
    dim = tl.arange(0, BLOCK_D)
    is_value = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    packed = tl.load(rows + first_row + token, mask=is_row, other=0).to(tl.int64)
    place = packed[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + place, mask=is_value, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    # The packed row of a new token less its place among the keys: the same for all of a segment.
    ahead = marks + first_row - first_last
    is_marked = is_row
    if HAS_MARKS:
        is_marked = tl.load(marks + packed, mask=is_row, other=0) != 0

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    state = (highest, total, weighted)
    blocks_of_table = block_tables + table.to(tl.int64) * table_stride
    head_start = kv_head * head_stride
    masked = low
    if BLOCK_M >= LEAST_TALL and not IS_WINDOWED:
        # What the first token sees all others see: of a long context nearly every step needs no mask.
        masked += tl.maximum(tl.minimum(high, first_last + 1) - low, 0) // BLOCK_N * BLOCK_N
        for start in range(low, masked, BLOCK_N):
            state = _attend_keys(
                state, q, keys, values, start, high, last_key, first_key, first_last, ahead, is_marked,
                blocks_of_table, entry_stride, block_stride, slot_stride, head_start, scale_log2, HEAD_DIM,
                BLOCK_SIZE, BLOCK_N, BLOCK_D, UPCAST, True, False, False,
            )  # fmt: skip
    for start in range(masked, high, BLOCK_N):
        state = _attend_keys(
            state, q, keys, values, start, high, last_key, first_key, first_last, ahead, is_marked,
            blocks_of_table, entry_stride, block_stride, slot_stride, head_start, scale_log2, HEAD_DIM,
            BLOCK_SIZE, BLOCK_N, BLOCK_D, UPCAST, False, IS_WINDOWED, HAS_MARKS,
        )  # fmt: skip
    highest, total, weighted = state

    divisor = tl.where(total == 0.0, 1.0, total)
    at = head[:, None] * HEAD_DIM + dim[None, :]
    attended = weighted / divisor[:, None]
    part = tl.load(item + 7)  # not before, or it would take a register all the time
    if part < 0:
        out_place = out + packed[:, None] * out_token_stride + at
        tl.store(out_place, attended.to(out.dtype.element_ty), mask=is_value)
    else:
        written = (part + row // GROUP).to(tl.int64)
        tl.store(parts + written[:, None] * out_token_stride + at, attended, mask=is_value)
        log_sum = tl.where(total == 0.0, float("-inf"), highest + tl.log2(divisor))
        tl.store(log_sums + written * (out_token_stride // HEAD_DIM) + head, log_sum, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator] # Triton is untyped
def _merge_kernel(  # type: ignore[no-untyped-def] # arguments are pointers and numbers
    parts,
    log_sums,
    out,
    merges,
    entries,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    merge = merges + tl.program_id(0) * 3
    packed = tl.load(merge).to(tl.int64)
    first = tl.load(merge + 1)
    count = tl.load(merge + 2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    is_head = head < NUM_HEADS
    is_value = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    highest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    weighted = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for index in range(count):
        # The first part is never empty, so `highest` is a number from there on.
        place = tl.load(entries + first + index).to(tl.int64) * NUM_HEADS + head
        log_sum = tl.load(log_sums + place, mask=is_head, other=0.0)
        part = tl.load(parts + place[:, None] * HEAD_DIM + dim[None, :], mask=is_value, other=0.0)
        new_highest = tl.maximum(highest, log_sum)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(log_sum - new_highest)
        total = total * shrink + weight
        weighted = weighted * shrink[:, None] + part * weight[:, None]
        highest = new_highest
    place = (packed * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    total = tl.where(total == 0.0, 1.0, total)
    merged = (weighted / total[:, None]).to(out.dtype.element_ty)
    if count > 0:
        tl.store(out + place, merged, mask=is_value)


_HEADS_PER_MERGE = 8
_LEAST_TALL = 64  # rows of tiles of chunks
_MOST_SCALED = (
    64  # keys of a step whose values are in 8 bits: those of 128 take more registers than there are
)


def _num_keys(block_n: int, *, is_scaled: bool, has_marks: bool) -> int:
    """Returns the keys of a step: fewer where others would take more registers than there are."""
    if not is_scaled:
        return block_n
    return LEAST_ROWS if has_marks else min(block_n, _MOST_SCALED)


def attend_tiles(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    work: PagedWork,
    out: Tensor,
    marks: Tensor | None = None,
    *,
    scale: float,
    is_windowed: bool = False,
) -> None:
    """Fills out [T, Hq, D], contiguous and of the query's dtype.

    query: [T, Hq, D], channels contiguous.
    key_cache, value_cache: [num_blocks, block_size, Hkv, D], of the same strides; blocks may lie apart.
    Values may have scaled rows, in the same order as those of keys.
    marks: bool [T], rows that see later new tokens of their segment that are such rows too.
    is_windowed: whether rows see nothing before the first keys of their items.
    Sums are float32; float32 inputs are multiplied as IEEE has it.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    num_parts = max(1, work.num_parts)
    parts = torch.empty(num_parts, num_heads, head_dim, dtype=torch.float32, device=query.device)
    log_sums = torch.empty(parts.shape[:2], dtype=torch.float32, device=query.device)
    for items, tile in work.sets:
        _attend_kernel[(len(items), num_kv_heads)](
            query,
            key_cache,
            value_cache,
            out,
            parts,
            log_sums,
            items,
            work.rows,
            work.rows if marks is None else marks.view(torch.int8),
            work.block_tables,
            scale * 1.4426950408889634,  # exp(x) = 2 ^ (x log2(e))
            *work.block_tables.stride(),
            query.stride(0),
            query.stride(1),
            *key_cache.stride()[:3],
            num_heads * head_dim,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=key_cache.shape[1],
            TOKENS=tile.tokens,
            BLOCK_M=tile.block_m,
            BLOCK_N=_num_keys(tile.block_n, is_scaled=is_scaled(value_cache), has_marks=marks is not None),
            BLOCK_D=tile.block_d,
            UPCAST=not query.is_cuda,  # the interpreter multiplies bfloat16 as if it were integers
            LEAST_TALL=_LEAST_TALL,
            IS_WINDOWED=is_windowed,
            HAS_MARKS=marks is not None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    if len(work.merges):
        _merge_kernel[(len(work.merges), ceil_div(num_heads, _HEADS_PER_MERGE))](
            parts,
            log_sums,
            out,
            work.merges,
            work.entries,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_H=_HEADS_PER_MERGE,
            BLOCK_D=max(LEAST_ROWS, next_power_of_2(head_dim)),
            num_warps=4,
        )
