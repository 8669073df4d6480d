"""Describes what attention over a paged cache works on: segments of a pass, and the work of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from epd.stages.kernels.tiling import Tiling


@dataclass(frozen=True, slots=True)
class PagedWork:
    """Holds the kernels' work, int32 on the device: see `epd.stages.kernels.work_list.WorkList`.

    sets: items [I, 8] that are launched together, and their tiles.
    rows: [P], packed rows that items refer to. merges: [M, 3]. entries: [E].
    block_tables: [S, max_blocks], of any strides.
    """

    sets: Sequence[tuple[Tensor, Tiling]]
    rows: Tensor
    merges: Tensor
    entries: Tensor
    num_parts: int
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class AlikeSegments:
    """Holds segments of a pass with about as many new tokens, for the kernels' twin.

    segments: int32 [N]. max_new, max_context: of any of them.
    """

    segments: Tensor
    max_new: int
    max_context: int


@dataclass(frozen=True, slots=True)
class PagedSegments:
    """Locates the segments of a pass, int32 on the device; see `AttentionBatch`.

    block_tables: [S, max_blocks], of any strides.
    both_ways: bool [S].
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    window: int | None = None
    both_ways: Tensor | None = None
