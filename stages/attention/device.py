"""Computes attention over a paged cache on a GPU: the kernels' shared inputs, moved there at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from encoders.device import arrays_to_device
from encoders.kernels.dispatch import uses_kernels
from epd.types import Int32Array, ceil_div
from stages import kernels
from stages.kernels.paged_plain import attend_plain
from stages.kernels.tiles import PagedSegments, TileSet
from stages.kernels.tiling import MOST_SHORT, Tiling, tiling
from stages.kernels.work_list import work_list

if TYPE_CHECKING:
    from stages.attention.attention import AttentionBatch

# Programs of a decode step beyond the first of each segment, for each processor: one may wait for memory
# while another computes.
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class DeviceHeads:
    """Describes the heads of a layer, and the device that attends.

    group: query heads of a KV head.
    num_processors: of the device; 1 where no compiled kernel runs.
    """

    group: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_processors: int = 1

    @classmethod
    def of(cls, key_cache: Tensor, num_query_heads: int) -> DeviceHeads:
        """Describes the heads of a cache [num_blocks, block_size, Hkv, D]."""
        num_kv_heads, head_dim = key_cache.shape[2:]
        processors = _num_processors(key_cache.device) if uses_kernels(key_cache) else 1
        return cls(num_query_heads // num_kv_heads, num_kv_heads, head_dim, key_cache.dtype, processors)

    def tile(self, max_new: int) -> Tiling:
        """Returns the tiles of segments of at most `max_new` new tokens."""
        return tiling(max_new, self.group, self.head_dim, self.dtype)

    @property
    def num_more(self) -> int:
        """Returns how many items of work there may be beyond one for each tile: enough to busy the device."""
        return ceil_div(_PROGRAMS_PER_PROCESSOR * self.num_processors, self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Holds the kernels' inputs of a pass.

    slot_mapping: int64 [T].
    tile_sets: short segments and chunks; only those that exist.
    """

    slot_mapping: Tensor
    segments: PagedSegments
    tile_sets: tuple[TileSet, ...]

    @classmethod
    def build(cls, batch: AttentionBatch, device: torch.device, heads: DeviceHeads) -> DevicePlan:
        lens = np.diff(batch.query_starts)
        is_short = lens <= MOST_SHORT
        chosen = [np.flatnonzero(kind) for kind in (is_short, ~is_short) if kind.any()]
        tiles = [heads.tile(int(lens[one].max())) for one in chosen]
        work = [
            work_list(batch.query_starts, batch.context_lens, one, tile.tokens, heads.num_more)
            for one, tile in zip(chosen, tiles, strict=True)
        ]
        lists = [
            [one.astype(np.int32), each.items, each.merges] for one, each in zip(chosen, work, strict=True)
        ]
        slots, starts, contexts, tables, *moved = arrays_to_device(
            [batch.slot_mapping, batch.query_starts, batch.context_lens, batch.block_tables, *chain(*lists)],
            device,
        )
        tile_sets = tuple(
            TileSet(
                segments=moved[3 * i],
                items=moved[3 * i + 1],
                merges=moved[3 * i + 2],
                num_parts=work[i].num_parts,
                tile=tiles[i],
                max_new=int(lens[one].max()),
                max_context=int(batch.context_lens[one].max()),
            )
            for i, one in enumerate(chosen)
        )
        return cls(slots, PagedSegments(starts, contexts, tables), tile_sets)

    @classmethod
    def of_decodes(
        cls,
        slots: Tensor,
        contexts: Tensor,
        tables: Tensor,
        items: Tensor,
        merges: Tensor,
        heads: DeviceHeads,
        block_size: int,
    ) -> DevicePlan:
        """Plans one new token of each segment, from arrays whose values may change before each pass.

        slots: int64 [S]. contexts: int32 [S]. tables: int32 [S, max_blocks]. items, merges: see `WorkList`.
        """
        starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        tiles = TileSet(
            starts[:-1],
            items,
            merges,
            num_parts=len(items),
            tile=heads.tile(1),
            max_new=1,
            max_context=tables.shape[1] * block_size,
        )
        return cls(slots, PagedSegments(starts, contexts, tables), (tiles,))

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """Attends as `stages.attention.attention.attend` does."""
        if uses_kernels(query):
            return self.attend_by_kernels(query, key_cache, value_cache, scale)
        return attend_plain(query, key_cache, value_cache, self.segments, self.tile_sets, scale)

    def attend_by_kernels(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
    ) -> Tensor:
        """Attends by Triton's kernels, compiled on a GPU, interpreted elsewhere if that is asked for."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for tiles in self.tile_sets:
            kernels.attend_tiles(query, key_cache, value_cache, self.segments, tiles, out, scale=scale)
        return out


def decode_work(contexts: Int32Array, heads: DeviceHeads, num_items: int) -> tuple[Int32Array, Int32Array]:
    """Returns items [num_items, 5] and merges [S, 4] of one new token of each segment: see `WorkList`.

    contexts: int32 [S].
    """
    size = len(contexts)
    starts = np.arange(size + 1, dtype=np.int32)
    work = work_list(starts, contexts, np.arange(size), 1, heads.num_more).padded(num_items, size)
    return work.items, work.merges


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
