"""Computes attention over a paged cache on a GPU: the kernels' shared inputs, moved there at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from encoders.device import arrays_to_device
from encoders.kernels.dispatch import uses_kernels
from stages import kernels
from stages.kernels.paged_plain import attend_plain
from stages.kernels.tiles import PagedSegments, TileSet
from stages.kernels.tiling import MOST_SHORT

if TYPE_CHECKING:
    from stages.attention.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Holds the kernels' inputs of a pass.

    slot_mapping: int64 [T].
    tile_sets: short segments and chunks; only those that exist.
    """

    slot_mapping: Tensor
    segments: PagedSegments
    tile_sets: tuple[TileSet, ...]
    num_processors: int

    @classmethod
    def build(cls, batch: AttentionBatch, device: torch.device) -> DevicePlan:
        lens = np.diff(batch.query_starts)
        is_short = lens <= MOST_SHORT
        chosen = [np.flatnonzero(kind) for kind in (is_short, ~is_short) if kind.any()]
        rows = np.repeat(np.arange(len(lens)), lens)
        tiled = [(one, np.flatnonzero(np.isin(rows, one))) for one in chosen]
        slots, starts, contexts, tables, *pairs = arrays_to_device(
            [
                batch.slot_mapping,
                batch.query_starts,
                batch.context_lens,
                batch.block_tables,
                *(array.astype(np.int32) for pair in tiled for array in pair),
            ],
            device,
        )
        segments = PagedSegments(starts, contexts, tables)
        tile_sets = tuple(
            TileSet(pairs[2 * i], pairs[2 * i + 1], int(lens[one].max()), int(batch.context_lens[one].max()))
            for i, one in enumerate(chosen)
        )
        return cls(slots, segments, tile_sets, num_processors(slots))

    @classmethod
    def of_decodes(cls, slots: Tensor, contexts: Tensor, tables: Tensor, block_size: int) -> DevicePlan:
        """Plans one new token of each segment, from arrays whose values may change before each pass.

        slots: int64 [S]. contexts: int32 [S]. tables: int32 [S, max_blocks].
        """
        starts = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
        tiles = TileSet(starts[:-1], starts[:-1], 1, tables.shape[1] * block_size)
        segments = PagedSegments(starts, contexts, tables)
        return cls(slots, segments, (tiles,), num_processors(slots))

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
            kernels.attend_tiles(
                query,
                key_cache,
                value_cache,
                self.segments,
                tiles,
                out,
                scale=scale,
                num_processors=self.num_processors,
            )
        return out


def num_processors(tensor: Tensor) -> int:
    """Returns the number of processors of a tensor's device; 1 where no compiled kernel runs."""
    return _num_processors(tensor.device) if uses_kernels(tensor) else 1


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
