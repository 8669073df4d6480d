"""Finds the slots of tokens, and copies them between pools of blocks in as few pieces as possible.

source slots   | 4 5 6 7 | 8 9 10 11 |  2  3 |      block_size 4, in both pools
target slots   | 0 1 2 3 | 4 5  6  7 | 13 14 |
pieces         |  two whole blocks   | tokens of a block

A plane is what lies apart in a pool: [num_blocks, num_layers, count, block_size, Hkv, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import to_device
from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.types import Int64Array, ceil_div

# Copying a run of slots costs about as much as indexing a few of them: shorter runs are cheaper indexed.
_LEAST_MEAN_RUN = 4
# Where a copy begins and ends within blocks.
_FEW_RUNS = 2


def token_slots(block_table: Sequence[int], start: int, stop: int, block_size: int) -> Tensor:
    """Returns where tokens [start, stop) lie, int64 [stop - start].

    Raises ValueError past the table's end.
    """
    if not 0 <= start <= stop <= len(block_table) * block_size:
        raise ValueError(
            f"tokens [{start}, {stop}) are not in {len(block_table)} blocks of {block_size}; allocate first"
        )
    first_block = start // block_size
    blocks = torch.tensor(block_table[first_block : ceil_div(stop, block_size)], dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    return slots[start - first_block * block_size : stop - first_block * block_size]


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Holds `length` whole blocks, or tokens of one block, that follow each other in both pools.

    source, target: numbers of blocks, or slots of tokens
    """

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class SlotRuns:
    """Lists the pieces of a copy.

    whole: source and target, int64 [2, B], of whole blocks.
    slots: source and target, int64 [2, N], of the tokens in no whole block. tokens: the same in pieces.
    """

    whole: Int64Array
    tokens: tuple[CopyRun, ...]
    slots: Int64Array

    def blocks(self) -> list[CopyRun]:
        """Lists the runs of whole blocks, of which these go to those."""
        sources, targets = self.whole
        is_cut = (np.diff(sources) != 1) | (np.diff(targets) != 1)
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(sources)), np.bool_), is_cut]))
        counts = np.diff(starts, append=len(sources))
        return [
            CopyRun(int(sources[start]), int(targets[start]), int(count))
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
        CopyRun(int(sources[start]), int(targets[start]), int(length))
        for start, length in zip(starts[~is_whole], lengths[~is_whole], strict=True)
    ]
    first = starts[is_whole]
    whole = np.stack([sources[first] // source_size, targets[first] // target_size])
    return SlotRuns(whole, tuple(tokens), np.stack([sources[is_loose], targets[is_loose]]))


def copy_runs(ours: Tensor, theirs: Tensor, runs: SlotRuns) -> None:
    """Copies all pieces to a plane from another pool's; block sizes may differ."""
    _copy_whole(ours, theirs, runs)
    is_host = ours.device.type == "cpu" == theirs.device.type
    least_mean = _LEAST_MEAN_RUN if is_host else ours.shape[3]
    if len(runs.tokens) <= _FEW_RUNS or runs.slots.shape[1] >= least_mean * len(runs.tokens):
        for run in runs.tokens:  # without a temporary
            tokens = _tokens(theirs, run.source, run.length)
            _tokens(ours, run.target, run.length).copy_(tokens, non_blocking=True)
    else:
        copy_slots(ours, theirs, *map(torch.from_numpy, runs.slots))


def _copy_whole(ours: Tensor, theirs: Tensor, runs: SlotRuns) -> None:
    """Copies whole blocks: inside of a GPU by one kernel, else by a copy for each run of them."""
    is_near = ours.device == theirs.device and uses_kernels(ours)
    if is_near and ours.is_contiguous() and theirs.is_contiguous() and runs.whole.size:
        there, here = to_device(torch.from_numpy(runs.whole), ours.device)
        kernels.copy_blocks_fused(theirs, ours, there, here)
        return
    for run in runs.blocks():
        blocks = theirs[run.source : run.source + run.length]
        ours[run.target : run.target + run.length].copy_(blocks, non_blocking=True)


def _tokens(plane: Tensor, slot: int, num_tokens: int) -> Tensor:
    """Returns a view of tokens of one block, from `slot` on: [num_layers, count, num_tokens, Hkv, width]."""
    block_size = plane.shape[3]
    start = slot % block_size
    return plane[slot // block_size, :, :, start : start + num_tokens]


def copy_slots(ours: Tensor, theirs: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copies tokens one by one, int64 [N] each: the plain twin, and faster than many small copies."""
    here, there = to_device(source_slots, theirs.device), to_device(target_slots, ours.device)
    tokens = theirs[here // theirs.shape[3], :, :, here % theirs.shape[3]]
    ours[there // ours.shape[3], :, :, there % ours.shape[3]] = tokens.to(ours.device)
