"""Finds the blocks that several decodes of a pass read, where one reading for all of them pays on a GPU.

    block tables   a | 7 | 9 | 4 | 2 |         first seen    0 1 2 3
                   b | 7 | 9 | 4 | 8 |  5 |                  0 1 2 7 8       a, b: tokens of three blocks
                   c | 3 | 6 |                               10 11

A GPU reads blocks wherever they lie, so a block is named here by the place where it is first seen: what
several tables have in common becomes a run, as `epd.stages.attention.runs` finds it for memory read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from epd.stages.attention.runs import SharedRun, find_runs
from epd.stages.kernels.work_list import LEAST_KEYS, Tiles
from epd.types import Int32Array, Int64Array, ceil_div

# What a GPU could read in the time of the two launches more that a layer takes: 3 microseconds at 2.8 TB/s.
LAUNCH_BYTES = 8 * 2**20


def shared_prefixes(
    query_starts: Int32Array,
    context_lens: Int32Array,
    block_tables: Int32Array,
    block_size: int,
    *,
    tile_tokens: int,
    bytes_per_token: int,
) -> list[SharedRun]:
    """Returns what decodes of a pass read together, see `AttentionBatch`; nothing if it does not pay.

    tile_tokens: decodes that one tile takes. bytes_per_token: keys and values of one layer.
    """
    column = LEAST_KEYS // block_size - 1  # of the block that ends the shortest prefix that is shared
    is_decode = np.diff(query_starts) == 1
    if column >= block_tables.shape[1]:
        return []
    able = np.flatnonzero(is_decode & (context_lens > LEAST_KEYS))
    _, inverse, counts = np.unique(block_tables[able, column], return_inverse=True, return_counts=True)
    able = able[counts[inverse] > 1]
    if not len(able):
        return []
    seen = context_lens[able].astype(np.int64) - 1
    names = _first_seen(block_tables[able], ceil_div(seen, block_size))
    runs = find_runs(names, seen, block_size, least_alone=_NEVER, least_shared=LEAST_KEYS)
    runs = [SharedRun(tuple(able[list(run.segments)].tolist()), run.start, run.num_tokens, 0) for run in runs]
    saved = sum(
        run.num_tokens * (len(run.segments) - ceil_div(len(run.segments), tile_tokens)) for run in runs
    )
    return runs if saved * bytes_per_token >= LAUNCH_BYTES else []


_NEVER = 2**62


def _first_seen(tables: Int32Array, num_blocks: Int64Array) -> Int32Array:
    """Returns tables [N, max_blocks] with each block named by where it comes first, row after row.

    num_blocks: [N], of each table; what lies behind them has any name.
    """
    flat = tables.ravel()
    held = np.flatnonzero((np.arange(tables.shape[1]) < num_blocks[:, None]).ravel())[::-1]
    names = np.zeros(int(tables.max()) + 1, np.int32)
    names[flat[held]] = held  # the last one written is the first one in order
    return names[flat].reshape(tables.shape)


def prefix_tiles(
    runs: Sequence[SharedRun], query_starts: Int32Array, first_place: int, tile_tokens: int
) -> tuple[Tiles, Int64Array]:
    """Tiles what is read together. first_place: of its rows in the list of rows, int64 [P], returned too."""
    sizes = np.array([len(run.segments) for run in runs], np.int64)
    rows = query_starts.astype(np.int64)[np.concatenate([run.segments for run in runs])]
    per_run = ceil_div(sizes, tile_tokens)
    owner = np.repeat(np.arange(len(runs)), per_run)
    skipped = (np.arange(len(owner)) - np.repeat(np.cumsum(per_run) - per_run, per_run)) * tile_tokens
    tables = np.array([run.segments[0] for run in runs], np.int64)[owner]
    lows = np.array([run.start for run in runs], np.int64)[owner]
    highs = lows + np.array([run.num_tokens for run in runs], np.int64)[owner]
    num_rows = np.minimum(tile_tokens, sizes[owner] - skipped)
    first = first_place + (np.cumsum(sizes) - sizes)[owner] + skipped
    return Tiles(tables, first, num_rows, highs, lows, highs), rows


def own_tiles(runs: Sequence[SharedRun], query_starts: Int32Array, context_lens: Int32Array) -> Tiles:
    """Tiles what the decodes of these runs read alone: before, between and behind them."""
    found: list[tuple[int, int, int]] = []  # segment, first key, the key behind the last
    cuts = sorted((segment, run.start, run.num_tokens) for run in runs for segment in run.segments)
    for segment, mine in groupby(cuts, key=itemgetter(0)):
        low = 0
        for _, start, length in mine:
            found += [(segment, low, start)] if start > low else []
            low = start + length
        found.append((segment, low, int(context_lens[segment])))
    segments, lows, highs = np.array(found, np.int64).T
    last = context_lens.astype(np.int64)[segments] - 1
    return Tiles(segments, query_starts.astype(np.int64)[segments], np.ones_like(segments), last, lows, highs)
