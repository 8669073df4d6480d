"""Locates the keys of a pass: which runs of blocks are read at once, and what must be gathered.

Blocks that follow each other in a block table and in memory make a run. A long run is read at once, for
all segments whose tables lead through it; the rest of a segment's blocks is *loose*.

    block table   | 7 | 8 | 9 | 10 | 11 |  4  |  15  |      block_size 4
    tokens        |  run [0, 20), slot 28 | loose [20, 26)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epd.types import BoolArray, Int64Array, ceil_div


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Holds `num_tokens` tokens from token `start` of each of `segments`, in slots from `first_slot` on."""

    segments: tuple[int, ...]
    start: int
    num_tokens: int
    first_slot: int


def find_runs(
    block_tables: NDArray[np.int32], seen: Int64Array, block_size: int, *, least_alone: int, least_shared: int
) -> list[SharedRun]:
    """Finds the runs worth reading alone.

    block_tables: [S, max_blocks]. seen: [S], tokens of each segment that may be read alone.
    least_alone, least_shared: tokens of a run that is worth it for one segment, for several together.
    A run ends within a block only where `seen` does, and never for several segments.
    """
    least_shared = max(least_shared, block_size)
    open_runs = defaultdict(list)
    for segment, start, stop, slot in _consecutive(block_tables, seen, block_size, least_shared):
        open_runs[start, slot].append((stop, segment))
    found = []
    while open_runs:
        (start, slot), members = open_runs.popitem()
        length = min(members)[0] - start
        if len(members) > 1:
            length -= length % block_size
        if length >= (least_alone if len(members) == 1 else least_shared):
            found.append(SharedRun(tuple(segment for _, segment in members), start, length, slot))
        for stop, segment in members:  # those that continue where the shortest ends
            if stop - start - length >= least_shared:
                open_runs[start + length, slot + length].append((stop, segment))
    return sorted(found, key=lambda run: (run.start, run.segments))


def _consecutive(
    block_tables: NDArray[np.int32], seen: Int64Array, block_size: int, least: int
) -> list[tuple[int, int, int, int]]:
    """Returns (segment, first token, token after the last, first slot) of runs of `least` tokens or more."""
    segments = np.flatnonzero(seen >= least)
    if not len(segments):
        return []
    seen = seen[segments]
    num_blocks = ceil_div(seen, block_size)
    width = int(num_blocks.max())
    tables = block_tables[segments, :width].astype(np.int64)
    is_start = np.ones(tables.shape, np.bool_)
    is_start[:, 1:] = np.diff(tables, axis=1) != 1
    is_start &= np.arange(width) < num_blocks[:, None]
    row, column = np.nonzero(is_start)
    stop = num_blocks[row]
    stop[:-1] = np.where(row[1:] == row[:-1], column[1:], stop[:-1])
    first, last = column * block_size, np.minimum(stop * block_size, seen[row])
    long = last - first >= least
    slots = tables[row, column] * block_size
    columns = (segments[row], first, last, slots)
    return list(zip(*(values[long].tolist() for values in columns), strict=True))


@dataclass(frozen=True, slots=True)
class LooseBlocks:
    """Lists blocks of N segments that are gathered, side by side and padded to the longest.

    blocks: int64 [N, width]; padding repeats a segment's first block.
    positions: int64 [N or 1, width * block_size], the token at each place; padding has higher ones
    than the segment's blocks reach.
    """

    blocks: Int64Array
    positions: Int64Array


def all_blocks(block_tables: NDArray[np.int32], num_blocks: Int64Array, block_size: int) -> LooseBlocks:
    """Lists the first `num_blocks` [N] of each table."""
    width = int(num_blocks.max())
    is_held = np.arange(width) < num_blocks[:, None]
    blocks = np.where(is_held, block_tables[:, :width], block_tables[:, :1])
    return LooseBlocks(blocks.astype(np.int64), np.arange(width * block_size)[None])


def loose_blocks(
    block_tables: NDArray[np.int32], num_blocks: Int64Array, in_runs: BoolArray, block_size: int
) -> LooseBlocks:
    """Lists the first `num_blocks` [N] of each table but for those in runs, bool [N, max_blocks]."""
    is_loose = (np.arange(in_runs.shape[1]) < num_blocks[:, None]) & ~in_runs
    row, column = np.nonzero(is_loose)
    counts = is_loose.sum(1)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    blocks = np.repeat(block_tables[:, :1].astype(np.int64), counts.max(), axis=1)
    starts = np.full(blocks.shape, _NEVER)
    blocks[row, place] = block_tables[row, column]
    starts[row, place] = column * block_size
    return LooseBlocks(blocks, (starts[..., None] + np.arange(block_size)).reshape(len(blocks), -1))


_NEVER = np.int64(2**62)
