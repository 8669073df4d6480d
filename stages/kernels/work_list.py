"""Lists the work of the attention kernel on the host: which tile attends which keys, as equal pieces.

A *tile* is some new tokens of one segment. Its keys are cut every so many, the same number for all tiles of a
pass, so that one long context among short ones becomes many pieces and the short ones stay whole:

    tile 0   | keys ..... |
    tile 1   | keys ............ | keys ............ | keys ............ | keys ... |    four items
    tile 2   | keys .. |

Items of a tile that is not cut write their result; others write parts, which are merged (Dao et al. 2023,
"Flash-Decoding"; pieces of one size as in Ye et al. 2025, "FlashInfer", section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epd.types import Int32Array, Int64Array, ceil_div

LEAST_KEYS = 256  # of an item, unless its tile has no more
_ALIGNMENT = 64  # keys; a block of keys of any tiling
# Tokens of no segment begin here: an item that begins here attends nothing and writes nothing.
_NOWHERE = 2**30
_NOTHING = np.array([0, _NOWHERE, 0, 0, -1], np.int32)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Holds the items of tiles, and what is to be merged.

    items: int32 [I, 5], of each the segment, the first new token, the first key, the key behind the last, and
    the first of its rows among the parts, or -1 for those of a tile that is not cut.
    merges: int32 [M, 4], of rows whose keys are cut: the packed row, its first part, from there to its next
    part, and their number, which may be 0.
    num_parts: rows of all parts.
    """

    items: Int32Array
    merges: Int32Array
    num_parts: int

    def padded(self, num_items: int, num_merges: int) -> WorkList:
        """Returns the same work, with items and merges that do nothing."""
        items = np.tile(_NOTHING, (num_items, 1))
        items[: len(self.items)] = self.items
        merges = np.zeros((num_merges, 4), np.int32)
        merges[: len(self.merges)] = self.merges
        return WorkList(items, merges, self.num_parts)


def work_list(
    query_starts: Int32Array, context_lens: Int32Array, segments: Int64Array, tile_tokens: int, num_more: int
) -> WorkList:
    """Lists the work of some segments of a pass: see `AttentionBatch`.

    segments: int64 [N]. tile_tokens: new tokens of a tile.
    num_more: items at most beyond one for each tile.
    """
    starts = query_starts.astype(np.int64)[segments]
    lens = query_starts.astype(np.int64)[segments + 1] - starts
    per_segment = ceil_div(lens, tile_tokens)
    owner = np.repeat(np.arange(len(segments)), per_segment)
    first = _numbers(per_segment) * tile_tokens
    rows = np.minimum(tile_tokens, lens[owner] - first)
    stops = context_lens.astype(np.int64)[segments[owner]] - lens[owner] + first + rows
    keys = keys_each(int(stops.sum()), num_more)
    counts = ceil_div(stops, keys)
    tile, split = np.repeat(np.arange(len(counts)), counts), _numbers(counts)
    sizes = np.where(counts > 1, counts * rows, 0)
    bases = np.cumsum(sizes) - sizes
    parts = np.where(counts[tile] > 1, bases[tile] + split * rows[tile], -1)
    bounds = split * keys, np.minimum((split + 1) * keys, stops[tile])
    cut = np.flatnonzero(counts > 1)
    merged, offset = np.repeat(cut, rows[cut]), _numbers(rows[cut])
    packed = starts[owner[merged]] + first[merged] + offset
    return WorkList(
        _columns(segments[owner[tile]], first[tile], *bounds, parts),
        _columns(packed, bases[merged] + offset, rows[merged], counts[merged]),
        int(sizes.sum()),
    )


def keys_each(num_keys: int, num_more: int) -> int:
    """Returns into pieces of how many keys to cut all tiles, which have num_keys together."""
    return max(LEAST_KEYS, ceil_div(ceil_div(num_keys, num_more), _ALIGNMENT) * _ALIGNMENT)


def _numbers(counts: Int64Array) -> Int64Array:
    """Returns 0, 1, ... for each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _columns(*columns: NDArray[np.int64]) -> Int32Array:
    return np.stack(columns, axis=1).astype(np.int32)
