"""Describes what the attention kernels work on: the segments of a pass, and which of them are tiled alike."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stages.kernels.tiling import Tiling


@dataclass(frozen=True, slots=True)
class TileSet:
    """Holds segments that are tiled alike; integers on the device are int32.

    segments: [N].
    items: [I, 5]. merges: [M, 4]. num_parts: see `stages.kernels.work_list.WorkList`.
    max_new, max_context: of any of them.
    """

    segments: Tensor
    items: Tensor
    merges: Tensor
    num_parts: int
    tile: Tiling
    max_new: int
    max_context: int


@dataclass(frozen=True, slots=True)
class PagedSegments:
    """Locates the segments of a pass, int32 on the device; see `AttentionBatch`.

    block_tables: [S, max_blocks], of any strides.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
