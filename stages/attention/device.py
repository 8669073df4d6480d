"""Computes attention over a paged cache on a GPU: the kernels' shared inputs, moved there at once.

Import this module only where Triton is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from epd.types import ceil_div
from stages.kernels.paged_attention import PagedSegments, TileSet, attend_tiles

if TYPE_CHECKING:
    from stages.attention.attention import AttentionBatch

# Segments of at most this many new tokens are tiled apart from chunks, whose tiles would be mostly padding.
_MOST_SHORT = 8
# Every array starts at 16 bytes, or Triton compiles each kernel anew for other alignments.
_ALIGNMENT = 4


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
        is_short = lens <= _MOST_SHORT
        chosen = [np.flatnonzero(kind) for kind in (is_short, ~is_short) if kind.any()]
        rows = np.repeat(np.arange(len(lens)), lens)
        tiled = [(one, np.flatnonzero(np.isin(rows, one))) for one in chosen]
        slots, starts, contexts, tables, *pairs = _move(
            [
                batch.slot_mapping.view(np.int32),
                batch.query_starts,
                batch.context_lens,
                batch.block_tables.ravel(),
                *(array.astype(np.int32) for pair in tiled for array in pair),
            ],
            device,
        )
        segments = PagedSegments(starts, contexts, tables.view(batch.block_tables.shape))
        tile_sets = tuple(
            TileSet(pairs[2 * i], pairs[2 * i + 1], int(lens[one].max()), int(batch.context_lens[one].max()))
            for i, one in enumerate(chosen)
        )
        return cls(slots.view(torch.int64), segments, tile_sets, _num_processors(device))

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """Attends as `stages.attention.attention.attend` does."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for tiles in self.tile_sets:
            attend_tiles(
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


@cache
def _num_processors(device: torch.device) -> int:
    """Returns the number of processors of a device that runs kernels; 1 where they are interpreted."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _move(
    arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]], device: torch.device
) -> list[Tensor]:
    """Moves int32 arrays, flattened, in one transfer."""
    room = [ceil_div(len(array), _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = np.zeros(sum(room), np.int32)
    starts = np.cumsum([0, *room]).tolist()
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + len(array)] = array
    moved = torch.from_numpy(packed).to(device)
    return [moved[start : start + len(array)] for start, array in zip(starts, arrays, strict=False)]
