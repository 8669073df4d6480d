"""Computes attention over a paged cache on a CPU: the kernels' plain twin, made of few large operations.

A pass is cut once into *pieces* that every layer computes; where a row has several, they are merged by the
logarithms of their sums (Dao et al. 2022, "FlashAttention"; Juravsky et al. 2024, "Hydragen"):

    run        a long run of blocks, read once for all segments that share it
    causal     the new tokens of a chunk among themselves
    gathered   the rest: short contexts, and the loose blocks of long ones, padded side by side, and beside
               them the long runs of one segment alone

With a sliding window, tables are narrowed to the blocks that are attended, and chunks become masked pieces.
So do new tokens of which only some attend each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from epd.kv.drafting import MOST_DRAFTS
from epd.stages.attention.gathered import GatheredPiece, OwnSpan
from epd.stages.attention.pieces import (
    Attended,
    BlockSpan,
    CausalPiece,
    MaskedPiece,
    Piece,
    Rows,
    SharedRun,
    UnmaskedPiece,
    all_blocks,
    find_runs,
    loose_blocks,
)
from epd.types import BoolArray, Int64Array, ceil_div

if TYPE_CHECKING:
    from epd.stages.attention.attention import AttentionBatch

# Segments of at most this many new tokens, which a decode with its drafts never exceeds, are gathered side by
# side; longer ones are taken one by one.
_MOST_TOGETHER = 1 + MOST_DRAFTS
# Tokens of a run from which on reading it in place is cheaper than gathering it with others.
_LEAST_ALONE = 256
_LEAST_SHARED = 64
# Passes of at most this many segments read all runs alone: there is nothing to lay side by side.
_FEW = 2
# Tokens of a run or of a chunk's past that are read at once. What is read is copied first, and a long context
# of a large model would need as much memory again as one of its layers.
_MOST_AT_ONCE = 8192
# Rows of a chunk with a window that are computed at once.
_MASKED_ROWS = 512
# A batch of gathered segments costs about as much as this many padded tokens.
_BATCH_COST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Holds the pieces of a pass, in the order in which they are merged."""

    pieces: tuple[Piece, ...]

    @classmethod
    def build(cls, batch: AttentionBatch) -> HostPlan:
        return cls(_one_decode(batch) or tuple(_Cutter(_narrowed(batch)).cut()))

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """Attends as `epd.stages.attention.attention.attend` does."""
        num_rows, num_query_heads, dim = query.shape
        num_heads = key_cache.shape[2]
        query = query.reshape(num_rows, num_heads, num_query_heads // num_heads, dim)
        if len(self.pieces) == 1 and isinstance(self.pieces[0].rows.index, slice):
            out = self.pieces[0].attend(query, key_cache, value_cache, scale).out
            return out.reshape(num_rows, num_query_heads, dim)
        does_merge = any(piece.merges for piece in self.pieces)
        out = torch.zeros(query.shape, dtype=torch.float32 if does_merge else query.dtype)
        log_sums = torch.full(query.shape[:3], -torch.inf) if does_merge else None
        for piece in self.pieces:
            index = piece.rows.index
            _put(out, log_sums, piece, piece.attend(query[index], key_cache, value_cache, scale))
        return out.view(num_rows, num_query_heads, dim).to(query.dtype)


def _put(out: Tensor, log_sums: Tensor | None, piece: Piece, new: Attended) -> None:
    index = piece.rows.index
    if log_sums is None or new.log_sums is None or not piece.merges:
        out[index] = new.out.to(out.dtype)
        if log_sums is not None and new.log_sums is not None:
            log_sums[index] = new.log_sums
        return
    held = log_sums[index]
    weight = torch.sigmoid(new.log_sums - held)[..., None]
    out[index] = torch.lerp(out[index], new.out.to(out.dtype), weight)  # of nothing held: the new alone
    log_sums[index] = torch.logaddexp(held, new.log_sums)


def _one_decode(batch: AttentionBatch) -> tuple[Piece, ...]:
    """Plans one token of one request whose blocks follow each other; empty for other passes.

    The cutter would find the same, for a tenth of such a step.
    """
    if len(batch.slot_mapping) != 1:
        return ()
    context, block_size = int(batch.context_lens[0]), batch.block_size
    start = 0 if batch.window is None else max(0, context - batch.window)
    table = batch.block_tables[0, start // block_size : ceil_div(context, block_size)]
    first = int(table[0])
    if context - start > _MOST_AT_ONCE:
        return ()
    if int(table[-1]) - first + 1 != len(table) or (table[1:] - table[:-1] != 1).any():
        return ()
    keys = BlockSpan(context - start, first, first + len(table), skipped=start % block_size)
    return (UnmaskedPiece(Rows(slice(0, 1), 1), False, keys),)


def _narrowed(batch: AttentionBatch) -> AttentionBatch:
    """Returns the batch without the blocks that lie before every window, if it has one."""
    if batch.window is None:
        return batch
    past = batch.context_lens - np.diff(batch.query_starts)
    dropped = np.maximum(past - batch.window + 1, 0) // batch.block_size
    last = batch.block_tables.shape[1] - 1
    columns = np.minimum(np.arange(last + 1) + dropped[:, None], last)
    return replace(
        batch,
        context_lens=(batch.context_lens - dropped * batch.block_size).astype(np.int32),
        block_tables=np.take_along_axis(batch.block_tables, columns, axis=1),
    )


class _Cutter:
    """Cuts one pass into pieces; discarded when that is done."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._starts = batch.query_starts.astype(np.int64)
        self._lens = np.diff(self._starts)
        self._contexts = batch.context_lens.astype(np.int64)
        self._past = self._contexts - self._lens
        self._in_runs = np.zeros(batch.block_tables.shape, np.bool_)
        self._num_in_runs = np.zeros(len(self._lens), np.int64)  # tokens
        self._own: dict[int, list[tuple[int, int]]] = {}  # of a segment, first slots and tokens of spans
        self._merges = np.zeros(len(self._lens), np.bool_)  # with pieces of its rows that come before
        self._most_at_once = max(1, _MOST_AT_ONCE // batch.block_size) * batch.block_size  # tokens

    def cut(self) -> list[Piece]:
        is_chunk = self._lens > _MOST_TOGETHER
        if self._batch.both_ways is not None:
            is_chunk |= np.logical_or.reduceat(self._batch.both_ways, self._starts[:-1])
        pieces = [] if self._batch.window else self._cut_runs(is_chunk)
        for segment in np.flatnonzero(is_chunk).tolist():
            pieces += self._cut_chunk(segment)
        alike: dict[tuple[int, bool, int], list[int]] = {}
        kinds = zip(self._lens.tolist(), self._merges.tolist(), is_chunk.tolist(), strict=True)
        for segment, (num_new, merges, is_long) in enumerate(kinds):
            num_own = sum(num_tokens for _, num_tokens in self._own.get(segment, ()))
            if not is_long:
                alike.setdefault((num_new, merges, num_own.bit_length()), []).append(segment)
        for _, segments in sorted(alike.items()):
            pieces += self._cut_alike(np.array(segments))
        return pieces

    def _cut_runs(self, is_chunk: BoolArray) -> list[Piece]:
        """Cuts the runs of keys that all new tokens of a segment attend."""
        tables, block_size = self._batch.block_tables, self._batch.block_size
        seen = np.where(self._lens == 1, self._contexts, self._past)
        # Blocks that are gathered are gathered whole.
        seen -= np.where((self._lens > 1) & ~is_chunk, seen % block_size, 0)
        least_alone = least_shared = _LEAST_SHARED
        if len(self._lens) > _FEW:
            least_alone = _LEAST_ALONE
            if len(set(tables[:, 0].tolist())) == len(tables):
                least_shared = least_alone
        runs = find_runs(tables, seen, block_size, least_alone=least_alone, least_shared=least_shared)
        are_chunks: list[bool] = is_chunk.tolist()
        pieces: list[Piece] = []
        for run in runs:
            if len(run.segments) == 1 and not are_chunks[run.segments[0]]:
                self._note_own(run)
            else:
                pieces += self._cut_run(run)
        return pieces

    def _note_own(self, run: SharedRun) -> None:
        """Notes a run as spans of the only segment that reads it."""
        segment, block_size, stop = run.segments[0], self._batch.block_size, run.start + run.num_tokens
        self._in_runs[segment, run.start // block_size : ceil_div(stop, block_size)] = True
        self._num_in_runs[segment] += run.num_tokens
        spans = self._own.setdefault(segment, [])
        for done in range(0, run.num_tokens, self._most_at_once):
            spans.append((run.first_slot + done, min(self._most_at_once, run.num_tokens - done)))

    def _cut_run(self, run: SharedRun) -> Iterator[Piece]:
        block_size, segments = self._batch.block_size, list(run.segments)
        stop = run.start + run.num_tokens
        self._in_runs[segments, run.start // block_size : ceil_div(stop, block_size)] = True
        rows = self._rows(segments)
        first = run.first_slot // block_size
        for done in range(0, run.num_tokens, self._most_at_once):
            num_tokens = min(self._most_at_once, run.num_tokens - done)
            start = first + done // block_size
            self._num_in_runs[segments] += num_tokens
            merges = bool(self._merges[segments].any())
            self._merges[segments] = True
            keys = BlockSpan(num_tokens, start, start + ceil_div(num_tokens, block_size))
            yield UnmaskedPiece(rows, merges, keys)

    def _rows(self, segments: Sequence[int]) -> Rows:
        bounds = [(self._starts[segment], self._starts[segment + 1]) for segment in segments]
        return Rows.of(np.concatenate([np.arange(start, stop) for start, stop in bounds]))

    def _cut_chunk(self, segment: int) -> list[Piece]:
        """Cuts what is in no run of a longer segment: its past, then the new tokens among themselves."""
        if self._batch.window is not None:
            return list(self._cut_masked(segment, self._batch.window))
        start, stop = self._starts[segment : segment + 2].tolist()
        past, block_size = int(self._past[segment]), self._batch.block_size
        rows = Rows(slice(start, stop), stop - start)
        table = self._batch.block_tables[segment].astype(np.int64)
        # Only the last block of the past may be partly past; if it is loose, it is the last one.
        loose = table[: ceil_div(past, block_size)][~self._in_runs[segment, : ceil_div(past, block_size)]]
        num_loose, num_done = int(past - self._num_in_runs[segment]), int(self._num_in_runs[segment])
        pieces: list[Piece] = []
        for done in range(0, num_loose, self._most_at_once):
            num_tokens = min(self._most_at_once, num_loose - done)
            blocks = loose[done // block_size : ceil_div(done + num_tokens, block_size)]
            pieces.append(UnmaskedPiece(rows, num_done + done > 0, BlockSpan.of(blocks, num_tokens)))
        new = table[past // block_size : ceil_div(past + stop - start, block_size)]
        span = BlockSpan.of(new, stop - start, past % block_size)
        both_ways = self._both_ways(segment)
        if both_ways.all():
            pieces.append(UnmaskedPiece(rows, past > 0, span))
        elif both_ways.any():
            pieces += self._cut_masked(segment)
        else:
            pieces.append(CausalPiece(rows, past > 0, span))
        return pieces

    def _both_ways(self, segment: int) -> BoolArray:
        """Returns which of a segment's new tokens attend each other, bool [n]."""
        start, stop = self._starts[segment : segment + 2].tolist()
        marks = self._batch.both_ways
        return np.zeros(stop - start, np.bool_) if marks is None else marks[start:stop]

    def _cut_masked(self, segment: int, window: int | None = None) -> Iterator[Piece]:
        """Cuts the rows of a chunk so that each piece reads little more than its rows attend.

        window: with the past that it leaves; without one only new tokens are read.
        """
        start, stop = self._starts[segment : segment + 2].tolist()
        past, block_size, both_ways = (
            int(self._past[segment]),
            self._batch.block_size,
            self._both_ways(segment),
        )
        for first in range(start, stop, _MASKED_ROWS):
            last = min(first + _MASKED_ROWS, stop)
            at = np.arange(first, last) - start + past  # of the rows
            low = past if window is None else max(0, int(at[0]) - window + 1)
            is_marked = both_ways[first - start : last - start]
            high = int(self._contexts[segment]) if is_marked.any() else int(at[-1]) + 1
            keys = np.arange(low, high)
            is_later = (keys >= past) & both_ways[np.maximum(keys - past, 0)]
            is_seen = (keys <= at[:, None]) | (is_marked[:, None] & is_later)
            if window is not None:
                is_seen &= keys > at[:, None] - window
            blocks = self._batch.block_tables[segment, low // block_size : ceil_div(high, block_size)]
            span = BlockSpan.of(blocks.astype(np.int64), high - low, low % block_size)
            mask = torch.from_numpy(np.where(is_seen, _ZERO, _MINUS_INFINITY))
            merges = window is None and past > 0
            yield MaskedPiece(Rows(slice(first, last), last - first), merges, span, mask)

    def _cut_alike(self, segments: Int64Array) -> list[Piece]:
        """Cuts the rest of segments with equally many new tokens, and spans of about the same length."""
        num_loose = (self._contexts - self._num_in_runs)[segments]
        has_any = (num_loose > 0) | np.array([segment in self._own for segment in segments.tolist()])
        segments, num_loose = segments[has_any], num_loose[has_any]
        if not len(segments):
            return []
        if (num_loose.max() - num_loose).sum() <= _BATCH_COST_TOKENS:
            return [self._gathered(segments)]
        order = np.argsort(-num_loose, kind="stable")
        batches = _batches(num_loose[order].tolist())
        return [self._gathered(np.sort(segments[order[start:stop]])) for start, stop in batches]

    def _gathered(self, segments: Int64Array) -> Piece:
        tables, block_size = self._batch.block_tables, self._batch.block_size
        contexts, num_each = self._contexts[segments, None], int(self._lens[segments[0]])
        num_blocks = ceil_div(contexts[:, 0], block_size)
        if self._num_in_runs[segments].any():
            loose = loose_blocks(tables[segments], num_blocks, self._in_runs[segments], block_size)
        else:
            loose = all_blocks(tables[segments], num_blocks, block_size)
        width = int((self._contexts - self._num_in_runs)[segments].max())
        # Padding repeats the first block, so it is unwritten where the context ends in that block, and where
        # a window begins in it.
        window, is_partial = self._batch.window, contexts < block_size
        reach = np.where(is_partial | (window is not None), _EVERYWHERE, num_blocks[:, None] * block_size)
        is_unwritten = (loose.positions >= contexts) & (loose.positions < reach)
        if window is not None:
            is_unwritten |= loose.positions <= self._past[segments, None] - window
        is_unwritten[:, width:] = False  # not used
        last_seen = self._past[segments, None, None] + np.arange(num_each)[:, None]
        is_seen = loose.positions[:, None, :width] <= last_seen
        if window is not None:
            is_seen &= loose.positions[:, None, :width] > last_seen - window
        return GatheredPiece(
            Rows.of((self._starts[segments][:, None] + np.arange(num_each)).ravel()),
            bool(self._merges[segments[0]]),
            loose.blocks,
            np.stack(np.nonzero(is_unwritten)),
            torch.from_numpy(np.where(is_seen, _ZERO, _MINUS_INFINITY)[:, None]),
            not bool(is_seen.all()),
            tuple(self._own_spans(segments)),
        )

    def _own_spans(self, segments: Int64Array) -> Iterator[OwnSpan]:
        """Returns the spans of a piece's segments, those of each side by side."""
        for number, segment in enumerate(segments.tolist()):
            column = 0
            for slot, num_tokens in self._own.get(segment, ()):
                yield OwnSpan(number, column, slot, num_tokens)
                column += num_tokens


_EVERYWHERE = np.int64(2**63 - 1)
_ZERO, _MINUS_INFINITY = np.float32(0), np.float32(-np.inf)


def _batches(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns half-open ranges of counts, which descend, that are worth padding to their first."""
    bounds, waste = [0], 0
    for index, count in enumerate(counts):
        waste += counts[bounds[-1]] - count
        if waste > _BATCH_COST_TOKENS:
            bounds.append(index)
            waste = 0
    return list(pairwise([*bounds, len(counts)]))
