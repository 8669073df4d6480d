"""Computes what the Qwen towers take of the grids in a batch: where patches lie, and what attends what.

transformers computes it anew in each call, and reads it back from the device in every layer. Here it is
computed on the host, moved in one copy, and kept for the batches seen last. Run lengths stay on the host: the
towers cut their queries and keys by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import vision_utils

from epd.encoders.adapter import Grid
from epd.encoders.device import arrays_to_device

_MAX_KEPT = 32


@dataclass(frozen=True, slots=True)
class WindowGeometry:
    """Describes a tower with windows. merge: patches of a token's edge. window, patch: edges, pixels."""

    merge: int
    window: int
    patch: int


@dataclass(frozen=True, slots=True)
class TableGeometry:
    """Describes a tower with a learned table of places. merge: as above. side: places along its edge."""

    merge: int
    side: int
    mode: str = "bilinear"
    align_corners: bool = True


@lru_cache(_MAX_KEPT)
@torch.inference_mode(mode=False)
def windowed_inputs(
    grids: tuple[Grid, ...], geometry: WindowGeometry, device: torch.device
) -> dict[str, Tensor]:
    """Returns the arguments of Qwen2.5-VL's tower besides the patches. device: the tower's."""
    grid_thw = _tensor(grids)
    index, run_ends = vision_utils.get_vision_window_index(
        grid_thw, geometry.merge, geometry.window, geometry.patch
    )
    moved = {"position_ids": vision_utils.get_vision_position_ids(grid_thw, geometry.merge)}
    return {
        "grid_thw": grid_thw,
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_thw),
        "cu_window_seqlens": run_ends,
        **_moved({**moved, "window_index": index}, device),
    }


@lru_cache(_MAX_KEPT)
@torch.inference_mode(mode=False)
def tabled_inputs(
    grids: tuple[Grid, ...], geometry: TableGeometry, device: torch.device
) -> dict[str, Tensor]:
    """Returns the arguments of Qwen3-VL's tower besides the patches. device: the tower's."""
    grid_thw = _tensor(grids)
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid_thw,
        geometry.side,
        mode=geometry.mode,
        align_corners=geometry.align_corners,
        spatial_merge_size=geometry.merge,
    )
    positions = vision_utils.get_vision_position_ids(grid_thw, geometry.merge)
    moved = {"position_ids": positions, "interp_indices": indices, "interp_weights": weights}
    return {
        "grid_thw": grid_thw,
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_thw),
        **_moved(moved, device),
    }


def _tensor(grids: tuple[Grid, ...]) -> Tensor:
    """Returns int64 [grids, 3]: time, height, width."""
    return torch.tensor([[grid.t, grid.h, grid.w] for grid in grids])


def _moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    moved = arrays_to_device([tensor.numpy() for tensor in tensors.values()], device)
    return dict(zip(tensors, moved, strict=True))
