"""Computes parts of a pass's attention on a CPU: some keys for some rows, each in a few large operations.

Shapes: as in `epd.stages.attention`; G = Hq / Hkv query heads to a KV head. Queries of several rows and of
the G heads that share a KV head are folded into one matrix, so keys are never repeated.

The keys of a pass are located first. Blocks that follow each other in a block table and in memory make a run.
A long run is read at once, for all segments whose tables lead through it; the rest of a segment's blocks is
*loose*.

    block table   | 7 | 8 | 9 | 10 | 11 |  4  |  15  |      block_size 4
    tokens        |  run [0, 20), slot 28 | loose [20, 26)
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epd.stages.kernels.scaled_values import is_scaled, unscaled
from epd.types import BoolArray, Int64Array, ceil_div

# What torch's scaled_dot_product_attention calls on a CPU; it also gives the logarithms of the sums.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


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
class GatheredBlocks:
    """Lists blocks of N segments that are gathered, side by side and padded to the longest.

    blocks: int64 [N, width]; padding repeats a segment's first block.
    positions: int64 [N or 1, width * block_size], the token at each place; padding has higher ones
    than the segment's blocks reach.
    """

    blocks: Int64Array
    positions: Int64Array


def all_blocks(block_tables: NDArray[np.int32], num_blocks: Int64Array, block_size: int) -> GatheredBlocks:
    """Lists the first `num_blocks` [N] of each table."""
    width = int(num_blocks.max())
    is_held = np.arange(width) < num_blocks[:, None]
    blocks = np.where(is_held, block_tables[:, :width], block_tables[:, :1])
    return GatheredBlocks(blocks.astype(np.int64), np.arange(width * block_size)[None])


def loose_blocks(
    block_tables: NDArray[np.int32], num_blocks: Int64Array, in_runs: BoolArray, block_size: int
) -> GatheredBlocks:
    """Lists the first `num_blocks` [N] of each table but for those in runs, bool [N, max_blocks]."""
    is_loose = (np.arange(in_runs.shape[1]) < num_blocks[:, None]) & ~in_runs
    row, column = np.nonzero(is_loose)
    counts = is_loose.sum(1)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    blocks = np.repeat(block_tables[:, :1].astype(np.int64), counts.max(), axis=1)
    starts = np.full(blocks.shape, _NEVER)
    blocks[row, place] = block_tables[row, column]
    starts[row, place] = column * block_size
    return GatheredBlocks(blocks, (starts[..., None] + np.arange(block_size)).reshape(len(blocks), -1))


_NEVER = np.int64(2**62)


@dataclass(frozen=True, slots=True)
class Rows:
    """Selects packed rows of some segments; index: int64 [N], or a slice where they follow each other."""

    index: Tensor | slice
    num_rows: int

    @classmethod
    def of(cls, rows: Int64Array) -> Rows:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows) and (np.diff(rows) == 1).all():
            return cls(slice(first, last + 1), len(rows))
        return cls(torch.from_numpy(rows), len(rows))


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Locates keys that follow each other in some blocks: `num_tokens` of them, after the first `skipped`.

    first, stop: blocks that follow each other in memory, half-open; or `blocks`, int64 [n], if given.
    """

    num_tokens: int
    first: int = 0
    stop: int = 0
    blocks: Tensor | None = None
    skipped: int = 0

    @classmethod
    def of(cls, blocks: Int64Array, num_tokens: int, skipped: int = 0) -> BlockSpan:
        first, last = int(blocks[0]), int(blocks[-1])
        if last - first + 1 == len(blocks) and (np.diff(blocks) == 1).all():
            return cls(num_tokens, first, last + 1, None, skipped)
        return cls(num_tokens, blocks=torch.from_numpy(blocks), skipped=skipped)

    def read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values, [Hkv, K, D] each, valid until the next read.

        Blocks that follow each other are read in place in caches of one piece; others are copied side by
        side, whole: products over memory in one piece earn the copy.
        """
        if self.blocks is None and is_one_piece(keys):
            start = self.first * keys.shape[1] + self.skipped
            held = slice(start, start + self.num_tokens)
            read = unscaled(values.flatten(0, 1)[held], keys.dtype)
            return keys.flatten(0, 1)[held].transpose(0, 1), read.transpose(0, 1)
        num_blocks = self.stop - self.first if self.blocks is None else len(self.blocks)
        together = scratch.take((2, num_blocks, *keys.shape[1:]), keys.dtype)
        for cache, part in zip((keys, values), together, strict=True):
            if self.blocks is None:
                part.copy_(unscaled(cache[self.first : self.stop], part.dtype))
            elif is_scaled(cache):
                part.copy_(unscaled(cache.index_select(0, self.blocks), part.dtype))
            else:
                torch.index_select(cache, 0, self.blocks, out=part)
        tokens = together.view(2, -1, *keys.shape[2:])[:, self.skipped : self.skipped + self.num_tokens]
        heads = tokens.transpose(1, 2)
        return heads[0], heads[1]


@dataclass(frozen=True, slots=True)
class Attended:
    """Holds a piece's result.

    out: [N, Hkv, G, D], weighted values.
    log_sums: float32 [N, Hkv, G]; None from a piece that comes last and merges with none before.
    """

    out: Tensor
    log_sums: Tensor | None


class Piece(Protocol):
    """Attends some keys for some rows. merges: the rows have results of earlier pieces."""

    @property
    def rows(self) -> Rows: ...
    @property
    def merges(self) -> bool: ...

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        """Attends query: [N, Hkv, G, D], the piece's rows.

        keys, values: caches [num_blocks, block_size, Hkv, D].
        """


@dataclass(frozen=True, slots=True)
class UnmaskedPiece:
    """Lets all rows attend all of the keys."""

    rows: Rows
    merges: bool
    keys: BlockSpan

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        num_rows, num_heads, group, dim = query.shape
        folded = query.transpose(0, 1).reshape(1, num_heads, num_rows * group, dim)
        keys, values = self.keys.read(keys, values)
        out, log_sums = _flash(folded, keys[None], values[None], scale=scale)
        shape = (num_heads, num_rows, group)
        return Attended(out.view(*shape, dim).transpose(0, 1), log_sums.view(shape).transpose(0, 1))


def _by_row(query: Tensor, keys: Tensor, values: Tensor, **which: Any) -> Attended:
    """Attends where rows attend different keys. which: of them, as the kernel has it."""
    each_head = (-1, query.shape[2], -1, -1)
    spread = (keys[:, None].expand(each_head), values[:, None].expand(each_head))
    out, log_sums = _flash(query.permute(1, 2, 0, 3), *spread, **which)
    return Attended(out.permute(2, 0, 1, 3), log_sums.permute(2, 0, 1))


@dataclass(frozen=True, slots=True)
class CausalPiece:
    """Lets row i attend the keys up to its own: as many keys as rows."""

    rows: Rows
    merges: bool
    keys: BlockSpan

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        return _by_row(query, *self.keys.read(keys, values), is_causal=True, scale=scale)


@dataclass(frozen=True, slots=True)
class MaskedPiece:
    """Lets rows attend some of the keys. mask: float32 [N, K], minus infinity where a row does not."""

    rows: Rows
    merges: bool
    keys: BlockSpan
    mask: Tensor

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        mask = self.mask.to(query.dtype)
        return _by_row(query, *self.keys.read(keys, values), attn_mask=mask, scale=scale)


def is_one_piece(cache: Tensor) -> bool:
    """Reports whether the tokens of a head follow each other from block to block."""
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


class Scratch(threading.local):
    """Keeps memory for gathered keys and values, from layer to layer and from pass to pass.

    Large pieces of fresh memory cost more in page faults than the gathering itself.
    """

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor, uninitialised, valid until the next `take`."""
        num_values = prod(shape)
        held = self._held.get(dtype)
        if held is None or held.numel() < num_values:
            with torch.inference_mode(False):  # usable in either mode from now on
                held = torch.empty(num_values, dtype=dtype)
            self._held[dtype] = held
        return held[:num_values].view(shape)


scratch = Scratch()
