"""Computes attention over a paged cache on a GPU: the kernels' shared inputs, moved there at once.

Blocks that several decodes of a pass read are found, where one reading for all of them pays on a GPU.

    block tables   a | 7 | 9 | 4 | 2 |         first seen    0 1 2 3
                   b | 7 | 9 | 4 | 8 |  5 |                  0 1 2 7 8       a, b: tokens of three blocks
                   c | 3 | 6 |                               10 11

A GPU reads blocks wherever they lie, so a block is named here by the place where it is first seen: what
several tables have in common becomes a run, as `stages/attention/pieces.py` finds it for memory in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from epd.encoders.device import arrays_to_device
from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.stages.attention.pieces import SharedRun, find_runs
from epd.stages.kernels.tiles import (
    ITEM_WIDTH,
    LEAST_KEYS,
    MERGE_WIDTH,
    AlikeSegments,
    PagedSegments,
    PagedWork,
    Tiles,
    WorkList,
    attend_plain,
    segment_tiles,
    work_list,
)
from epd.stages.kernels.tiling import MOST_SHORT, Tiling, tiling
from epd.types import BoolArray, Int32Array, Int64Array, ceil_div

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
    return Tiles(tables, first, num_rows, highs, lows, highs, np.zeros_like(lows)), rows


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
    rows = query_starts.astype(np.int64)[segments]
    return Tiles(segments, rows, np.ones_like(segments), last, lows, highs, np.zeros_like(lows))


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
        window: int | None = None,
        both_ways: BoolArray | None = None,
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
            segment_tiles(
                query_starts, context_lens, np.flatnonzero(is_alone & kind), tile.tokens, window, both_ways
            )
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
    marks: bool [T], rows that attend each other, where these are some of a segment's; None where its tiles
        say so.
    """

    slot_mapping: Tensor
    segments: PagedSegments
    alike: tuple[AlikeSegments, ...]
    work: PagedWork
    marks: Tensor | None = None

    @classmethod
    def build(cls, batch: AttentionBatch, device: torch.device, heads: DeviceHeads) -> DevicePlan:
        runs: Sequence[SharedRun] = ()
        if batch.window is None:
            runs = heads.shared(batch.query_starts, batch.context_lens, batch.block_tables, batch.block_size)
        listed = PassWork.of(
            batch.query_starts, batch.context_lens, runs, heads, batch.window, batch.both_ways
        )
        lens = np.diff(batch.query_starts)
        is_short = lens <= MOST_SHORT
        chosen = [np.flatnonzero(kind) for kind in (is_short, ~is_short) if kind.any()]
        sets = [each for each in zip(listed.work.items, listed.tiles, strict=True) if len(each[0])]
        segments = [one.astype(np.int32) for one in chosen]
        both_ways = np.zeros(0, np.int32) if batch.both_ways is None else batch.both_ways
        slots, starts, contexts, both, tables, rows, merges, entries, *moved = arrays_to_device(
            [
                batch.slot_mapping,
                batch.query_starts,
                batch.context_lens,
                both_ways.astype(np.int32),
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
        is_both = None if batch.both_ways is None else both.bool()
        found = PagedSegments(starts, contexts, tables, batch.window, is_both)
        return cls(slots, found, alike, work, is_both if batch.marks_some else None)

    @classmethod
    def fixed(
        cls,
        slots: Tensor,
        segments: PagedSegments,
        max_new: int,
        work: FixedWork,
        heads: DeviceHeads,
        block_size: int,
    ) -> DevicePlan:
        """Plans a pass from arrays whose values may change before it runs.

        slots: int64 [T]. segments: of at most max_new new tokens, or of none. Rows of no segment are left
        as they are.
        """
        contexts, tables = segments.context_lens, segments.block_tables
        numbers = torch.arange(len(contexts), dtype=torch.int32, device=slots.device)
        alike = AlikeSegments(numbers, max_new, max_context=tables.shape[1] * block_size)
        tiles = heads.tile(1), heads.tile(MOST_SHORT + 1)
        paged = PagedWork(
            list(zip(work.items, tiles, strict=False)),
            work.rows,
            work.merges,
            work.entries,
            len(work.entries),
            tables,
        )
        return cls(slots, segments, (alike,), paged)

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
        window = self.segments.window is not None
        kernels.attend_tiles(
            query, key_cache, value_cache, self.work, out, self.marks, scale=scale, is_windowed=window
        )
        return out


@dataclass(frozen=True, slots=True)
class FixedWork:
    """Holds the work of a pass in memory of fixed size, on the device or on the host: see `WorkList`.

    items: of both sets, or of the first where decodes read nothing together.
    """

    items: Sequence[Any]
    rows: Any
    merges: Any
    entries: Any


@dataclass(frozen=True, slots=True)
class WorkRoom:
    """Says how much work a pass has at most: items of each set, rows that they refer to, merges, entries.

    Decodes that read something together are as many as its segments at most. One that takes part in several
    runs counts for each of them, and has a piece before each.
    """

    num_items: tuple[int, int]
    num_rows: int
    num_merges: int
    num_entries: int

    @classmethod
    def of_decodes(cls, num_seqs: int, heads: DeviceHeads) -> WorkRoom:
        """Returns the room for a new token of each of num_seqs segments."""
        own, together = 2 * num_seqs + heads.num_more, num_seqs + heads.num_more
        most_parts = num_seqs + heads.tile(MOST_SHORT + 1).tokens * heads.num_more
        return cls((own, together), 2 * num_seqs, num_seqs, own + most_parts)

    @classmethod
    def of_tokens(cls, num_tokens: int, num_seqs: int, heads: DeviceHeads) -> WorkRoom:
        """Returns the room for num_tokens new tokens of at most num_seqs segments."""
        short, tall = (heads.tile(most).tokens for most in (MOST_SHORT, MOST_SHORT + 1))
        num_short = min(num_tokens, num_seqs * ceil_div(MOST_SHORT, short))
        num_tall = num_tokens // tall + min(num_seqs, num_tokens // (MOST_SHORT + 1))
        num_items = num_short + num_seqs + heads.num_more, num_tall + num_seqs + heads.num_more
        num_parts = num_tokens + 2 * num_seqs + heads.num_more * (short + tall)
        return cls(num_items, num_tokens + num_seqs, num_tokens, num_parts)

    @classmethod
    def of_all(cls, rooms: Sequence[WorkRoom]) -> WorkRoom:
        """Returns the room that is enough for each of several passes."""
        short, tall = (max(room.num_items[number] for room in rooms) for number in (0, 1))
        names = "num_rows", "num_merges", "num_entries"
        return cls((short, tall), *(max(getattr(room, name) for room in rooms) for name in names))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Returns the shapes of a `FixedWork`: of both sets of items, and of the rest."""
        items = [(number, ITEM_WIDTH) for number in self.num_items]
        return [*items, (self.num_rows,), (self.num_merges, MERGE_WIDTH), (self.num_entries,)]


def fixed_work(
    query_starts: Int32Array,
    contexts: Int32Array,
    runs: Sequence[SharedRun],
    heads: DeviceHeads,
    room: WorkRoom,
) -> FixedWork:
    """Returns the work of a pass, see `PassWork`, with what does nothing behind it."""
    listed = PassWork.of(query_starts, contexts, runs, heads)
    work = listed.work.padded(room.num_items, room.num_merges, room.num_entries)
    rows = np.zeros(room.num_rows, np.int32)
    rows[: len(listed.rows)] = listed.rows
    return FixedWork(work.items, rows, work.merges, work.entries)


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _chip(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
