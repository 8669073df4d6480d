"""Attention over a paged cache on a CPU: the plain twin of the kernels, made of few large operations.

A pass is cut once into *pieces* that every layer computes; where a row has several, they are merged by the
logarithms of their sums (Dao et al. 2022, "FlashAttention"; Juravsky et al. 2024, "Hydragen"):

    in place   a long run of blocks, read where it lies, once for all segments that share it
    causal     the new tokens of a chunk among themselves
    gathered   the rest: short contexts, and the loose blocks of long ones, padded side by side

Shapes: as in `stages.attention`; G = Hq / Hkv query heads to a KV head. Queries of several rows and of the G
heads that share a KV head are folded into one matrix, so keys are never repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.attention_runs import SharedRun, find_runs, loose_keys

if TYPE_CHECKING:
    from stages.attention import AttentionBatch

Int64Array = NDArray[np.int64]

# What torch's scaled_dot_product_attention calls on a CPU; it also gives the logarithms of the sums.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Segments of up to so many new tokens are gathered side by side; longer ones are taken one by one.
_MOST_TOGETHER = 8
# Tokens of a run from which on reading in place is cheaper than gathering. Each call on one segment wakes
# every thread, which a padded batch of segments does once.
_LEAST_ALONE_PER_THREAD = 256
_LEAST_SHARED = 64
# A batch of gathered segments costs about as much as this many padded tokens.
_BATCH_COST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows of some segments; index: int64 [N], or a slice where they follow each other."""

    index: Tensor | slice
    num_rows: int

    @classmethod
    def of(cls, rows: Int64Array) -> Rows:
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows) and (np.diff(rows) == 1).all():
            return cls(slice(first, last + 1), len(rows))
        return cls(torch.from_numpy(rows), len(rows))


@dataclass(frozen=True, slots=True)
class Attended:
    """A piece's result. out: [N, Hkv, G, D], weighted values; log_sums: float32 [N, Hkv, G]."""

    out: Tensor
    log_sums: Tensor


class Piece(Protocol):
    """Some keys for some rows. merges: the rows have results of earlier pieces."""

    @property
    def rows(self) -> Rows: ...
    @property
    def merges(self) -> bool: ...

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        """query: [N, Hkv, G, D], the piece's rows. keys, values: caches [slots, Hkv, D]."""


@dataclass(frozen=True, slots=True)
class UnmaskedPiece:
    """All rows attend all of the keys in slots [first, stop), or in `slots`, int64 [K], if given."""

    rows: Rows
    merges: bool
    first: int = 0
    stop: int = 0
    slots: Tensor | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        num_rows, num_heads, group, dim = query.shape
        folded = query.transpose(0, 1).reshape(1, num_heads, num_rows * group, dim)
        keys, values = _read(self, keys, values)
        out, log_sums = _flash(folded, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], scale=scale)
        shape = (num_heads, num_rows, group)
        return Attended(out.view(*shape, dim).transpose(0, 1), log_sums.view(shape).transpose(0, 1))


@dataclass(frozen=True, slots=True)
class CausalPiece:
    """Row i attends the keys up to its own: as many keys as rows, one after another as in UnmaskedPiece."""

    rows: Rows
    merges: bool
    first: int = 0
    stop: int = 0
    slots: Tensor | None = None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        keys, values = _read(self, keys, values)
        each_head = (query.shape[1], query.shape[2], *keys.shape[::2])
        out, log_sums = _flash(
            query.permute(1, 2, 0, 3),
            keys.transpose(0, 1)[:, None].expand(each_head),
            values.transpose(0, 1)[:, None].expand(each_head),
            is_causal=True,
            scale=scale,
        )
        return Attended(out.permute(2, 0, 1, 3), log_sums.permute(2, 0, 1))


@dataclass(frozen=True, slots=True)
class GatheredPiece:
    """S segments of Q rows each, with keys side by side: slots int64 [S * W], padded to W for each.

    mask: float32 [S, 1, Q, W], minus infinity where a row does not attend; None where all do.
    """

    rows: Rows
    merges: bool
    num_segments: int
    slots: Tensor
    mask: Tensor | None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Attended:
        num_rows, num_heads, group, dim = query.shape
        num_segments, num_each = self.num_segments, num_rows // self.num_segments
        folded = query.view(num_segments, num_each, num_heads, group, dim).permute(0, 2, 3, 1, 4)
        keys, values = (
            cache.view(num_segments, -1, num_heads, dim).transpose(1, 2)
            for cache in _read(self, keys, values)
        )
        mask = self.mask
        if mask is not None:
            mask = mask.to(query.dtype)
            if num_each > 1:
                mask = mask.repeat(1, 1, group, 1)
        shape = (num_segments, num_heads, group, num_each)
        out, log_sums = _flash(folded.reshape(*shape[:2], -1, dim), keys, values, attn_mask=mask, scale=scale)
        # out lies in memory as [S, group * Q, Hkv, D].
        out = out.view(*shape, dim).permute(0, 3, 1, 2, 4)
        log_sums = log_sums.view(shape).permute(0, 3, 1, 2)
        if num_each == 1:
            return Attended(out.squeeze(1), log_sums.squeeze(1))
        return Attended(out.flatten(0, 1), log_sums.flatten(0, 1))


class _Scratch(threading.local):
    """Memory for gathered keys and values, kept from layer to layer and from pass to pass.

    Large pieces of fresh memory cost more in page faults than the gathering itself.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype], Tensor] = {}

    def take(self, index: int, num_rows: int, like: Tensor) -> Tensor:
        """[num_rows, *like.shape[1:]], uninitialised, valid until the next `take` of that index."""
        num_values = num_rows * like[0].numel()
        held = self._held.get((index, like.dtype))
        if held is None or held.numel() < num_values:
            with torch.inference_mode(False):  # usable in either mode from now on
                held = torch.empty(num_values, dtype=like.dtype)
            self._held[index, like.dtype] = held
        return held[:num_values].view(num_rows, *like.shape[1:])


_scratch = _Scratch()


def _read(
    piece: UnmaskedPiece | CausalPiece | GatheredPiece, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """A piece's keys and values, [K, Hkv, D]: views of the caches, or gathered."""
    if piece.slots is None:
        return keys[piece.first : piece.stop], values[piece.first : piece.stop]
    return _gather(keys, piece.slots, 0), _gather(values, piece.slots, 1)


def _gather(cache: Tensor, slots: Tensor, index: int) -> Tensor:
    rows = _scratch.take(index, len(slots), cache)
    return torch.index_select(cache, 0, slots, out=rows)


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The pieces of a pass, in the order in which they are merged."""

    pieces: tuple[Piece, ...]

    @classmethod
    def build(cls, batch: AttentionBatch) -> HostPlan:
        return cls(tuple(_Cutter(batch).cut()))

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """As `stages.attention.attend`."""
        num_rows, num_query_heads, dim = query.shape
        num_heads = key_cache.shape[2]
        keys, values = key_cache.view(-1, num_heads, dim), value_cache.view(-1, num_heads, dim)
        query = query.reshape(num_rows, num_heads, num_query_heads // num_heads, dim)
        if len(self.pieces) == 1 and isinstance(self.pieces[0].rows.index, slice):
            out = self.pieces[0].attend(query, keys, values, scale).out
            return out.reshape(num_rows, num_query_heads, dim)
        does_merge = any(piece.merges for piece in self.pieces)
        out = torch.zeros(query.shape, dtype=torch.float32 if does_merge else query.dtype)
        log_sums = torch.full(query.shape[:3], -torch.inf) if does_merge else None
        for piece in self.pieces:
            index = piece.rows.index
            _put(out, log_sums, piece, piece.attend(query[index], keys, values, scale))
        return out.view(num_rows, num_query_heads, dim).to(query.dtype)


def _put(out: Tensor, log_sums: Tensor | None, piece: Piece, new: Attended) -> None:
    index = piece.rows.index
    if log_sums is None or not piece.merges:
        out[index] = new.out.to(out.dtype)
        if log_sums is not None:
            log_sums[index] = new.log_sums
        return
    held = log_sums[index]
    weight = torch.sigmoid(new.log_sums - held)[..., None]
    out[index] = torch.lerp(out[index], new.out.to(out.dtype), weight)  # of nothing held: the new alone
    log_sums[index] = torch.logaddexp(held, new.log_sums)


class _Cutter:
    """Cuts one pass into pieces; thrown away when that is done."""

    def __init__(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._starts = batch.query_starts.astype(np.int64)
        self._lens = np.diff(self._starts)
        self._contexts = batch.context_lens.astype(np.int64)
        self._is_chunk = self._lens > _MOST_TOGETHER
        self._in_place = np.zeros(batch.block_tables.shape, np.bool_)
        self._has_run = np.zeros(len(self._lens), np.bool_)

    def cut(self) -> list[Piece]:
        pieces: list[Piece] = self._cut_runs()
        for segment in np.flatnonzero(self._is_chunk).tolist():
            pieces += self._cut_chunk(segment)
        together = np.flatnonzero(~self._is_chunk)
        if len(together):
            pieces += self._cut_together(together)
        return pieces

    def _cut_runs(self) -> list[Piece]:
        """Keys that all new tokens of a segment attend, read in place."""
        batch, block_size = self._batch, self._batch.block_size
        past = self._contexts - self._lens
        seen = np.where(self._lens == 1, self._contexts, past)
        seen -= np.where((self._lens > 1) & ~self._is_chunk, past % block_size, 0)
        least_alone = _LEAST_ALONE_PER_THREAD * torch.get_num_threads()
        runs = find_runs(
            batch.block_tables, seen, block_size, least_alone=least_alone, least_shared=_LEAST_SHARED
        )
        return [self._cut_run(run) for run in runs]

    def _cut_run(self, run: SharedRun) -> Piece:
        block_size, segments = self._batch.block_size, list(run.segments)
        stop = run.start + run.num_tokens
        self._in_place[segments, run.start // block_size : -(-stop // block_size)] = True
        # Together they may only begin: later runs are merged.
        merges = bool(self._has_run[segments].any())
        self._has_run[segments] = True
        first = run.first_slot
        return UnmaskedPiece(self._rows(segments), merges, first, first + run.num_tokens)

    def _rows(self, segments: Sequence[int]) -> Rows:
        bounds = [(self._starts[segment], self._starts[segment + 1]) for segment in segments]
        return Rows.of(np.concatenate([np.arange(start, stop) for start, stop in bounds]))

    def _cut_chunk(self, segment: int) -> list[Piece]:
        """What is not in place of a longer segment: its past, then the new tokens among themselves."""
        start, stop = self._starts[segment : segment + 2].tolist()
        rows = Rows(slice(start, stop), stop - start)
        past = self._contexts[segment : segment + 1] - self._lens[segment]
        place = slice(segment, segment + 1)
        loose = loose_keys(
            self._batch.block_tables[place], past, self._in_place[place], self._batch.block_size
        )
        merges = bool(self._has_run[segment])
        pieces: list[Piece] = []
        if loose.slots.size:
            pieces.append(UnmaskedPiece(rows, merges, *_place(loose.slots[0])))
        pieces.append(CausalPiece(rows, bool(past[0] > 0), *_place(self._batch.slot_mapping[start:stop])))
        return pieces

    def _cut_together(self, segments: Int64Array) -> list[Piece]:
        """What is not in place of the short segments, side by side with others like them."""
        kinds = self._lens[segments] * 2 + self._has_run[segments]
        pieces: list[Piece] = []
        for kind in np.unique(kinds).tolist():
            pieces += self._cut_alike(segments[kinds == kind])
        return pieces

    def _cut_alike(self, segments: Int64Array) -> list[Piece]:
        """Of segments with as many new tokens each, and all with or all without runs in place."""
        keys = loose_keys(
            self._batch.block_tables[segments],
            self._contexts[segments],
            self._in_place[segments],
            self._batch.block_size,
        )
        counts = keys.counts
        order = np.argsort(-counts, kind="stable")
        order = order[: np.count_nonzero(counts)]
        pieces: list[Piece] = []
        for start, stop in _batches(counts[order].tolist()):
            chosen = np.sort(order[start:stop])
            width = int(counts[chosen].max())
            pieces.append(
                self._gathered(segments[chosen], keys.slots[chosen, :width], keys.positions[chosen, :width])
            )
        return pieces

    def _gathered(self, segments: Int64Array, slots: Int64Array, positions: Int64Array) -> Piece:
        num_each = int(self._lens[segments[0]])
        past = (self._contexts - self._lens)[segments]
        reach = past[:, None] + np.arange(num_each)
        is_seen = positions[:, None] <= reach[..., None]
        mask = None
        if not is_seen.all():
            mask = torch.from_numpy(np.where(is_seen, np.float32(0), np.float32(-np.inf))[:, None])
        rows = (self._starts[segments][:, None] + np.arange(num_each)).ravel()
        merges = bool(self._has_run[segments[0]])
        return GatheredPiece(Rows.of(rows), merges, len(segments), torch.from_numpy(slots.ravel()), mask)


def _place(slots: Int64Array) -> tuple[int, int, Tensor | None]:
    """first, stop, None of slots that follow each other; else 0, 0 and the slots."""
    if int(slots[-1] - slots[0]) + 1 == len(slots) and (np.diff(slots) == 1).all():
        return int(slots[0]), int(slots[-1]) + 1, None
    return 0, 0, torch.from_numpy(np.ascontiguousarray(slots))


def _batches(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of counts, which descend, that are worth padding to their first."""
    bounds, waste = [0], 0
    for index, count in enumerate(counts):
        waste += counts[bounds[-1]] - count
        if waste > _BATCH_COST_TOKENS:
            bounds.append(index)
            waste = 0
    return list(pairwise([*bounds, len(counts)])) if counts else []
