"""Describes what attention over a paged cache works on, and attends in plain torch as the kernels do.

The plain twin runs on any device and reads nothing back: it stands in where values are missing too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epd.stages.kernels.scaled_values import unscaled
from epd.stages.kernels.tiling import Tiling


@dataclass(frozen=True, slots=True)
class PagedWork:
    """Holds the kernels' work, int32 on the device: see `epd.stages.kernels.work_list.WorkList`.

    sets: items [I, 8] that are launched together, and their tiles.
    rows: [P], packed rows that items refer to. merges: [M, 3]. entries: [E].
    block_tables: [S, max_blocks], of any strides.
    """

    sets: Sequence[tuple[Tensor, Tiling]]
    rows: Tensor
    merges: Tensor
    entries: Tensor
    num_parts: int
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class AlikeSegments:
    """Holds segments of a pass with about as many new tokens, for the kernels' twin.

    segments: int32 [N]. max_new, max_context: of any of them.
    """

    segments: Tensor
    max_new: int
    max_context: int


@dataclass(frozen=True, slots=True)
class PagedSegments:
    """Locates the segments of a pass, int32 on the device; see `AttentionBatch`.

    block_tables: [S, max_blocks], of any strides.
    both_ways: bool [S].
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    window: int | None = None
    both_ways: Tensor | None = None


def attend_plain(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    segments: PagedSegments,
    alike: Sequence[AlikeSegments],
    scale: float,
) -> Tensor:
    """Attends query [T, Hq, D] over caches [num_blocks, block_size, Hkv, D]: [T, Hq, D].

    value_cache: may have scaled rows.
    Segments that are alike are padded to the longest; what padding computes goes to one more row.
    """
    num_rows = len(query)
    out = query.new_zeros(num_rows + 1, *query.shape[1:])
    for some in alike:
        starts = segments.query_starts[some.segments]
        num_new = segments.query_starts[some.segments + 1] - starts
        token = torch.arange(some.max_new, device=query.device)
        rows = torch.where(token < num_new[:, None], starts[:, None] + token, num_rows)
        contexts = segments.context_lens[some.segments]
        at = (contexts - num_new)[:, None] + token
        last_seen = at
        if segments.both_ways is not None:
            last_seen = torch.where(segments.both_ways[some.segments, None], contexts[:, None] - 1, at)
        first_seen = None if segments.window is None else at - segments.window + 1
        tables = segments.block_tables[some.segments]
        first = None if first_seen is None else first_seen[:, :1]
        gathered = [
            _gather(cache, tables, contexts, some.max_context, first) for cache in (key_cache, value_cache)
        ]
        padded = torch.cat([query, query.new_zeros(1, *query.shape[1:])])[rows]
        values = unscaled(gathered[1], torch.float32)
        out[rows] = _attend(padded, gathered[0], values, (first_seen, last_seen), scale)
    return out[:num_rows]


def _gather(
    cache: Tensor, tables: Tensor, contexts: Tensor, max_context: int, first: Tensor | None
) -> Tensor:
    """Gathers [N, max_context, Hkv, D] by block tables [N, max_blocks]; zeros past contexts, int32 [N].

    first: [N, 1], that are attended; zeros before.
    What a table has past its context is not read.
    """
    starts = torch.arange(0, max_context, cache.shape[1], device=cache.device)
    is_read = (starts < contexts[:, None]) & (tables[:, : len(starts)] >= 0)
    blocks = cache[torch.where(is_read, tables[:, : len(starts)], 0)]
    tokens = blocks.flatten(1, 2)[:, :max_context]
    at = torch.arange(max_context, device=cache.device)
    is_held = at < contexts[:, None]
    if first is not None:
        is_held &= at >= first
    return torch.where(is_held[..., None, None], tokens, 0)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, seen: tuple[Tensor | None, Tensor], scale: float
) -> Tensor:
    """Attends query [N, Q, Hq, D] to keys [N, K, Hkv, D]; sums are float32.

    seen: the first and the last key of each row, [N, Q]; all are seen from the start if None.
    """
    first_seen, last_seen = seen
    num_heads = keys.shape[2]
    folded = query.view(*query.shape[:2], num_heads, -1, query.shape[3]).float()  # [N, Q, Hkv, G, D]
    scores = torch.einsum("nqhgd,nkhd->nqhgk", folded, keys.float()) * scale
    at = torch.arange(keys.shape[1], device=keys.device)
    is_seen = at <= last_seen[..., None]
    if first_seen is not None:  # rows that pad a segment see none
        is_seen &= (at >= first_seen[..., None]) | (first_seen[..., None] >= keys.shape[1])
    weights = scores.masked_fill(~is_seen[:, :, None, None], -torch.inf).softmax(-1)
    return torch.einsum("nqhgk,nkhd->nqhgd", weights, values.float()).flatten(2, 3).to(query.dtype)
