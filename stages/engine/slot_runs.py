"""Finds what can be copied in one piece when tokens go from one pool of blocks to another.

source slots   | 4 5 6 7 | 8 9 10 11 |  2  3 |      block_size 4, in both pools
target slots   | 0 1 2 3 | 4 5  6  7 | 13 14 |
pieces         |  two whole blocks   | tokens of a block
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from epd.types import Int64Array


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Holds `num_blocks` whole blocks that follow each other in both pools, from these on."""

    source: int
    target: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Holds `num_tokens` that lie in one block of either pool. source, target: their first slots."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """Lists the pieces of a copy.

    whole: source and target, int64 [2, B], of whole blocks.
    slots: source and target, int64 [2, N], of the tokens in no whole block. tokens: the same in pieces.
    """

    whole: Int64Array
    tokens: tuple[TokenRun, ...]
    slots: Int64Array

    def blocks(self) -> list[BlockRun]:
        """Lists the runs of whole blocks, of which these go to those."""
        sources, targets = self.whole
        is_cut = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(sources)), np.bool_), is_cut]))
        counts = np.diff(starts, append=len(sources))
        return [
            BlockRun(int(sources[start]), int(targets[start]), int(count))
            for start, count in zip(starts, counts, strict=True)
        ]


def slot_runs(sources: Int64Array, targets: Int64Array, source_size: int, target_size: int) -> SlotRuns:
    """Cuts a copy of the tokens in slots `sources` to slots `targets`, int64 [N] each.

    source_size, target_size: block sizes, in tokens.
    """
    ascends = (np.diff(sources) == 1) & (np.diff(targets) == 1)
    is_inside = (sources[1:] % source_size != 0) & (targets[1:] % target_size != 0)
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(sources)), np.bool_), ~(ascends & is_inside)]))
    lengths = np.diff(starts, append=len(sources))
    is_whole = (lengths == source_size) & (source_size == target_size)
    is_loose = np.repeat(~is_whole, lengths)
    tokens = [
        TokenRun(int(sources[start]), int(targets[start]), int(length))
        for start, length in zip(starts[~is_whole], lengths[~is_whole], strict=True)
    ]
    first = starts[is_whole]
    whole = np.stack([sources[first] // source_size, targets[first] // target_size])
    return SlotRuns(whole, tuple(tokens), np.stack([sources[is_loose], targets[is_loose]]))
