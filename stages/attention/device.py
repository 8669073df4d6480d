"""Computes attention over a paged cache on a GPU: the kernels' shared inputs, moved there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import arrays_to_device
from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.stages.attention.prefixes import own_tiles, prefix_tiles, shared_prefixes
from epd.stages.attention.runs import SharedRun
from epd.stages.kernels.paged_plain import attend_plain
from epd.stages.kernels.tiles import AlikeSegments, PagedSegments, PagedWork
from epd.stages.kernels.tiling import MOST_SHORT, Tiling, tiling
from epd.stages.kernels.work_list import (
    ITEM_WIDTH,
    MERGE_WIDTH,
    Tiles,
    WorkList,
    segment_tiles,
    work_list,
)
from epd.types import Int32Array, Int64Array, ceil_div

if TYPE_CHECKING:
    from epd.stages.attention.attention import AttentionBatch

# Programs of a decode step beyond the first of each segment, for each processor: one may wait for memory
# while another computes.
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class DeviceHeads:
    """Describes the heads of a layer, and the device that attends.

    group: query heads of a KV head.
    num_processors, chip: of the device, see `tiling`; 1 and 0 where no compiled kernel runs.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_processors: int = 1
    chip: int = 0

    @classmethod
    def of(cls, key_cache: Tensor, num_query_heads: int) -> DeviceHeads:
        """Describes the heads of a cache [num_blocks, block_size, Hkv, D]."""
        num_kv_heads, head_dim = key_cache.shape[2:]
        group = num_query_heads // num_kv_heads
        heads = cls(group, num_kv_heads, head_dim, key_cache.dtype)
        if not uses_kernels(key_cache):
            return heads
        device = key_cache.device
        return replace(heads, num_processors=_num_processors(device), chip=_chip(device))

    def tile(self, max_new: int) -> Tiling:
        """Returns the tiles of segments of at most `max_new` new tokens."""
        return tiling(max_new, self.group, self.head_dim, self.dtype, self.chip)

    def shared(
        self, query_starts: Int32Array, context_lens: Int32Array, block_tables: Int32Array, block_size: int
    ) -> list[SharedRun]:
        """Returns what decodes of a pass read together: see `shared_prefixes`."""
        return shared_prefixes(
            query_starts,
            context_lens,
            block_tables,
            block_size,
            tile_tokens=self.tile(MOST_SHORT + 1).tokens,
            bytes_per_token=2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize,
        )

    @property
    def num_more(self) -> int:
        """Returns how many items of work there may be beyond one for each tile: enough to busy the device."""
        return ceil_div(_PROGRAMS_PER_PROCESSOR * self.num_processors, self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class PassWork:
    """Holds the work of a pass on the host. tiles: of each set of items. rows: int64 [P], see `work_list`."""

    work: WorkList
    tiles: tuple[Tiling, ...]
    rows: Int64Array

    @classmethod
    def of(
        cls,
        query_starts: Int32Array,
        context_lens: Int32Array,
        runs: Sequence[SharedRun],
        heads: DeviceHeads,
    ) -> PassWork:
        """Lists the work of a pass, see `AttentionBatch`, in two sets, each of which may be empty.

        Short segments, and what those in `runs` read alone; chunks, and what is read together.
        """
        lens = np.diff(query_starts)
        is_alone = np.ones(len(lens), np.bool_)
        is_alone[[segment for run in runs for segment in run.segments]] = False
        short, tall = heads.tile(1), heads.tile(MOST_SHORT + 1)
        rows = np.arange(query_starts[-1], dtype=np.int64)
        sets = [
            segment_tiles(query_starts, context_lens, np.flatnonzero(is_alone & kind), tile.tokens)
            for kind, tile in ((lens <= MOST_SHORT, short), (lens > MOST_SHORT, tall))
        ]
        if runs:
            together, more = prefix_tiles(runs, query_starts, len(rows), tall.tokens)
            own = own_tiles(runs, query_starts, context_lens)
            sets = [Tiles.joined([sets[0], own]), Tiles.joined([sets[1], together])]
            rows = np.concatenate([rows, more])
        return cls(work_list(sets, rows, heads.num_more), (short, tall), rows)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Holds the inputs of a pass: of the kernels, and of their twin.

    slot_mapping: int64 [T]. alike: short segments and chunks; only those that exist.
    """

    slot_mapping: Tensor
    segments: PagedSegments
    alike: tuple[AlikeSegments, ...]
    work: PagedWork

    @classmethod
    def build(cls, batch: AttentionBatch, device: torch.device, heads: DeviceHeads) -> DevicePlan:
        runs = heads.shared(batch.query_starts, batch.context_lens, batch.block_tables, batch.block_size)
        listed = PassWork.of(batch.query_starts, batch.context_lens, runs, heads)
        lens = np.diff(batch.query_starts)
        is_short = lens <= MOST_SHORT
        chosen = [np.flatnonzero(kind) for kind in (is_short, ~is_short) if kind.any()]
        sets = [each for each in zip(listed.work.items, listed.tiles, strict=True) if len(each[0])]
        segments = [one.astype(np.int32) for one in chosen]
        slots, starts, contexts, tables, rows, merges, entries, *moved = arrays_to_device(
            [
                batch.slot_mapping,
                batch.query_starts,
                batch.context_lens,
                batch.block_tables,
                listed.rows.astype(np.int32),
                listed.work.merges,
                listed.work.entries,
                *(items for items, _ in sets),
                *segments,
            ],
            device,
        )
        items = [(each, tile) for each, (_, tile) in zip(moved, sets, strict=False)]
        alike = tuple(
            AlikeSegments(each, int(lens[one].max()), int(batch.context_lens[one].max()))
            for each, one in zip(moved[len(sets) :], chosen, strict=True)
        )
        work = PagedWork(items, rows, merges, entries, listed.work.num_parts, tables)
        return cls(slots, PagedSegments(starts, contexts, tables), alike, work)

    @classmethod
    def of_decodes(
        cls,
        slots: Tensor,
        contexts: Tensor,
        tables: Tensor,
        work: DecodeWork,
        heads: DeviceHeads,
        block_size: int,
    ) -> DevicePlan:
        """Plans one new token of each segment, from arrays whose values may change before each pass.

        slots: int64 [S]. contexts: int32 [S]. tables: int32 [S, max_blocks].
        """
        starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        alike = AlikeSegments(starts[:-1], max_new=1, max_context=tables.shape[1] * block_size)
        tiles = heads.tile(1), heads.tile(MOST_SHORT + 1)
        paged = PagedWork(
            list(zip(work.items, tiles, strict=False)),
            work.rows,
            work.merges,
            work.entries,
            len(work.entries),
            tables,
        )
        return cls(slots, PagedSegments(starts, contexts, tables), (alike,), paged)

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """Attends as `epd.stages.attention.attention.attend` does."""
        if uses_kernels(query):
            return self.attend_by_kernels(query, key_cache, value_cache, scale)
        return attend_plain(query, key_cache, value_cache, self.segments, self.alike, scale)

    def attend_by_kernels(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
    ) -> Tensor:
        """Attends by Triton's kernels, compiled on a GPU, interpreted elsewhere if that is asked for."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        kernels.attend_tiles(query, key_cache, value_cache, self.work, out, scale=scale)
        return out


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Holds the work of decodes in memory of fixed size, on the device or on the host: see `WorkList`.

    items: of one set, or of two where prefixes are read together.
    """

    items: Sequence[Any]
    rows: Any
    merges: Any
    entries: Any


@dataclass(frozen=True, slots=True)
class DecodeRoom:
    """Says how much work decodes have at most: items of each set, and entries."""

    num_items: tuple[int, int]
    num_entries: int

    @classmethod
    def of(cls, num_seqs: int, heads: DeviceHeads) -> DecodeRoom:
        """Returns the room for decodes of which at most num_seqs take part in something read together.

        One that takes part in several runs counts for each of them, and has a piece before each.
        """
        own, together = 2 * num_seqs + heads.num_more, num_seqs + heads.num_more
        most_parts = num_seqs + heads.tile(MOST_SHORT + 1).tokens * heads.num_more
        return cls((own, together), own + most_parts)

    def shapes(self, num_seqs: int) -> list[tuple[int, ...]]:
        """Returns the shapes of a `DecodeWork` of so many decodes: of both sets of items, and of the rest."""
        items = [(number, ITEM_WIDTH) for number in self.num_items]
        return [*items, (2 * num_seqs,), (num_seqs, MERGE_WIDTH), (self.num_entries,)]


def decode_work(
    contexts: Int32Array, runs: Sequence[SharedRun], heads: DeviceHeads, room: DecodeRoom
) -> DecodeWork:
    """Returns the work of one new token of each segment, with what does nothing behind it.

    contexts: int32 [S]. runs: with at most S members together.
    """
    size = len(contexts)
    starts = np.arange(size + 1, dtype=np.int32)
    listed = PassWork.of(starts, contexts, runs, heads)
    work = listed.work.padded(room.num_items, size, room.num_entries)
    rows = np.zeros(2 * size, np.int32)
    rows[: len(listed.rows)] = listed.rows
    return DecodeWork(work.items, rows, work.merges, work.entries)


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _chip(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
