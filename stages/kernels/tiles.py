"""Describes what attention over a paged cache works on, and lists the kernel's work as equal pieces.

A *tile* is some rows of a pass, and the keys that all of them attend. Its keys are cut every so many, the
same number for all tiles of a set, so that one long context among short ones becomes many pieces:

    tile 0   | keys ..... |
    tile 1   | keys ............ | keys ............ | keys ............ | keys ... |    four items
    tile 2   | keys .. |

Rows of decodes that share a prefix attend it in a tile of its own, and what is theirs alone in another:

    tile 3   | prefix of rows 5, 6 and 9 ..... |
    tile 4                                     | row 5 |     tile 5 | row 6 ... |     tile 6 | row 9 . |

Rows with one piece are written by its item; of others, items write parts, which are merged (Dao et al. 2023,
"Flash-Decoding"; pieces of one size as in Ye et al. 2025, "FlashInfer", section 3.3; prefixes as in Juravsky
et al. 2024, "Hydragen"). The kernels' plain twin, in torch, runs on any device and reads nothing back: it
stands in where values are missing too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.stages.kernels.scaled_values import unscaled
from epd.stages.kernels.tiling import Tiling
from epd.types import BoolArray, Int32Array, Int64Array, ceil_div

LEAST_KEYS = 256  # of an item, unless its tile has no more
_ALIGNMENT = 64  # keys; a block of keys of any tiling
ITEM_WIDTH = 8
MERGE_WIDTH = 3


@dataclass(frozen=True, slots=True)
class PagedWork:
    """Holds the kernels' work, int32 on the device: see `WorkList`.

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
    both_ways: bool [T], see `AttentionBatch`.
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
        later = None
        if segments.both_ways is not None:
            later = _later_seen(segments.both_ways, rows, contexts, num_new, some.max_context)
        first_seen = None if segments.window is None else at - segments.window + 1
        tables = segments.block_tables[some.segments]
        first = None if first_seen is None else first_seen[:, :1]
        gathered = [
            _gather(cache, tables, contexts, some.max_context, first) for cache in (key_cache, value_cache)
        ]
        padded = torch.cat([query, query.new_zeros(1, *query.shape[1:])])[rows]
        values = unscaled(gathered[1], torch.float32)
        out[rows] = _attend(padded, gathered[0], values, (first_seen, at, later), scale)
    return out[:num_rows]


def _later_seen(
    both_ways: Tensor, rows: Tensor, contexts: Tensor, num_new: Tensor, max_context: int
) -> Tensor:
    """Returns which keys rows [N, Q] attend though these may come later: bool [N, Q, max_context]."""
    marks = torch.cat([both_ways, both_ways.new_zeros(1)])[rows]  # of rows that pad a segment: none
    new = torch.arange(max_context, device=rows.device) - (contexts - num_new)[:, None]
    is_new = (new >= 0) & (new < num_new[:, None])
    keys = marks.gather(1, new.clamp(0, marks.shape[1] - 1)) & is_new
    return marks[:, :, None] & keys[:, None]


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
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: tuple[Tensor | None, Tensor, Tensor | None],
    scale: float,
) -> Tensor:
    """Attends query [N, Q, Hq, D] to keys [N, K, Hkv, D]; sums are float32.

    seen: the first and the last key of each row, [N, Q]; all are seen from the start if None. Later ones
        that it sees too, bool [N, Q, K].
    """
    first_seen, last_seen, later = seen
    num_heads = keys.shape[2]
    folded = query.view(*query.shape[:2], num_heads, -1, query.shape[3]).float()  # [N, Q, Hkv, G, D]
    scores = torch.einsum("nqhgd,nkhd->nqhgk", folded, keys.float()) * scale
    at = torch.arange(keys.shape[1], device=keys.device)
    is_seen = at <= last_seen[..., None]
    if later is not None:
        is_seen |= later
    if first_seen is not None:  # rows that pad a segment see none
        is_seen &= (at >= first_seen[..., None]) | (first_seen[..., None] >= keys.shape[1])
    weights = scores.masked_fill(~is_seen[:, :, None, None], -torch.inf).softmax(-1)
    return torch.einsum("nqhgk,nkhd->nqhgd", weights, values.float()).flatten(2, 3).to(query.dtype)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Holds the items of sets of tiles, and what is to be merged.

    items: of each set int32 [I, 8], of each item the block table, where its rows begin in the list of rows,
    their number, the last key of the first row (the next row has the next), the first key, the key behind the
    last, the first key that a window leaves to the first row (the next row has the next; it may be negative),
    and the first of its rows among the parts, or -1 where it writes the result.
    merges: int32 [M, 3], of rows with several pieces: the packed row, its first entry, and the number of
    entries, which may be 0.
    entries: int32 [E], rows among the parts. num_parts: rows of all parts.
    """

    items: tuple[Int32Array, ...]
    merges: Int32Array
    entries: Int32Array
    num_parts: int

    def padded(self, num_items: Sequence[int], num_merges: int, num_entries: int) -> WorkList:
        """Returns the same work, with items and merges that do nothing. num_items: of each set."""
        items = [np.tile(_NOTHING, (number, 1)) for number in num_items]
        for padded, each in zip(items, self.items, strict=True):
            padded[: len(each)] = each
        merges, entries = np.zeros((num_merges, MERGE_WIDTH), np.int32), np.zeros(num_entries, np.int32)
        merges[: len(self.merges)] = self.merges
        entries[: len(self.entries)] = self.entries
        return WorkList(tuple(items), merges, entries, self.num_parts)


def growth(items: Int32Array, num_tables: int) -> Int32Array:
    """Returns what a key more in each of the first tables adds to the items of decodes, of one shape.

    items: int32 [..., 8]. The last item of a table has one key more.
    """
    tables, num_rows, last_keys, stops = (items[..., column] for column in (0, 2, 3, 5))
    is_real = (num_rows > 0) & (tables < num_tables)
    added = np.zeros_like(items)
    added[..., 3], added[..., 5] = is_real, is_real & (stops > last_keys)
    return added


_NOTHING = np.array([0, 0, 0, 0, 0, 0, 0, -1], np.int32)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Describes N tiles, int64 [N] each: what `WorkList.items` have, with keys [low, high) not cut yet."""

    tables: Int64Array
    first_rows: Int64Array
    num_rows: Int64Array
    last_keys: Int64Array
    lows: Int64Array
    highs: Int64Array
    first_keys: Int64Array

    @classmethod
    def joined(cls, parts: Sequence[Tiles]) -> Tiles:
        some = [each for each in parts if len(each.lows)] or parts[:1]
        if len(some) == 1:
            return some[0]
        return cls(*(np.concatenate(columns) for columns in zip(*map(_columns_of, some), strict=True)))


def segment_tiles(
    query_starts: Int32Array,
    context_lens: Int32Array,
    segments: Int64Array,
    tile_tokens: int,
    window: int | None = None,
    both_ways: BoolArray | None = None,
) -> Tiles:
    """Tiles some segments of a pass, each with all of its keys: see `AttentionBatch`.

    segments: int64 [N]. tile_tokens: new tokens of a tile.
    """
    if not len(segments):
        return _NO_TILES
    starts = query_starts.astype(np.int64)
    lens = starts[segments + 1] - starts[segments]
    per_segment = ceil_div(lens, tile_tokens)
    owner = np.repeat(segments, per_segment)
    lens = np.repeat(lens, per_segment)
    first = _numbers(per_segment) * tile_tokens
    rows = np.minimum(tile_tokens, lens - first)
    contexts = context_lens.astype(np.int64)[owner]
    at = contexts - lens + first  # of the first row
    last, highs = at, np.minimum(at + rows, contexts)
    if both_ways is not None:
        marked = np.cumsum(np.concatenate([[0], both_ways]))
        is_whole = marked[starts[owner + 1]] - marked[starts[owner]] == lens
        last = np.where(is_whole, contexts - 1, at)
        has_any = marked[starts[owner] + first + rows] > marked[starts[owner] + first]
        highs = np.where(has_any, contexts, highs)
    first_keys = np.zeros_like(first) if window is None else at - window + 1
    return Tiles(owner, starts[owner] + first, rows, last, np.maximum(first_keys, 0), highs, first_keys)


def work_list(sets: Sequence[Tiles], rows: Int64Array, num_more: int) -> WorkList:
    """Lists the work of sets of tiles, each of which is launched alone.

    rows: int64 [P], the packed row of each place that tiles refer to; the rows of a tile have as many tiles.
    num_more: items of a set at most beyond one for each tile.
    """
    cut = [_cut(tiles, num_more) for tiles in sets]
    pieces = Tiles.joined(cut)
    owner = np.repeat(np.arange(len(pieces.num_rows)), pieces.num_rows)
    offset = _numbers(pieces.num_rows)
    packed = rows[pieces.first_rows[owner] + offset]  # of each row of each piece
    counts = np.bincount(packed)
    is_part = counts[rows[pieces.first_rows]] > 1
    sizes = np.where(is_part, pieces.num_rows, 0)
    bases = np.cumsum(sizes) - sizes
    items = _columns(*_columns_of(pieces), np.where(is_part, bases, -1))
    of_parts = is_part[owner]
    order = np.argsort(packed[of_parts], kind="stable")
    merged = np.flatnonzero(counts > 1)
    numbers = counts[merged]
    ends = list(accumulate(len(each.lows) for each in cut))
    return WorkList(
        tuple(items[start:end] for start, end in zip([0, *ends], ends, strict=False)),
        _columns(merged, np.cumsum(numbers) - numbers, numbers),
        (bases[owner] + offset)[of_parts][order].astype(np.int32),
        int(sizes.sum()),
    )


def _cut(tiles: Tiles, num_more: int) -> Tiles:
    """Cuts the keys of all tiles of a set into pieces of one length."""
    if not len(tiles.lows):
        return tiles
    lengths = tiles.highs - tiles.lows
    keys = keys_each(int(lengths.sum()), num_more)
    counts = ceil_div(lengths, keys)
    tile, piece = np.repeat(np.arange(len(counts)), counts), _numbers(counts)
    lows = tiles.lows[tile] + piece * keys
    highs = np.minimum(lows + keys, tiles.highs[tile])
    return Tiles(
        tiles.tables[tile],
        tiles.first_rows[tile],
        tiles.num_rows[tile],
        tiles.last_keys[tile],
        lows,
        highs,
        tiles.first_keys[tile],
    )


def _columns_of(tiles: Tiles) -> tuple[Int64Array, ...]:
    return tuple(getattr(tiles, name) for name in Tiles.__slots__)


_NO_TILES = Tiles(*(np.zeros(0, np.int64) for _ in Tiles.__slots__))


def keys_each(num_keys: int, num_more: int) -> int:
    """Returns into pieces of how many keys to cut all tiles, which have num_keys together."""
    return max(LEAST_KEYS, ceil_div(ceil_div(num_keys, num_more), _ALIGNMENT) * _ALIGNMENT)


def _numbers(counts: Int64Array) -> Int64Array:
    """Returns 0, 1, ... for each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _columns(*columns: NDArray[np.int64]) -> Int32Array:
    return np.stack(columns, axis=1).astype(np.int32)
