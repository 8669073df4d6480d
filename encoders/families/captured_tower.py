"""Replays captured calls of a Qwen tower, a few sizes of which are captured when a worker starts.

A batch is padded to the next size as if one more image came behind it, so all that a tower takes of grids is
that of a batch as any other, and its own rows are the first:

    size       | media of the batch          | one image, whose rows nobody reads |
    memory     | patches | places, windows, ends of runs | ... of the captured call
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from epd.encoders.device import device_of
from epd.encoders.families.qwen_tower import StaticRuns, static_bounds
from epd.encoders.plans import Grid

logger = logging.getLogger(__name__)

# By `model_type` of their configurations. GLM's reads grids on the host, others have layers of their own.
_CAPTURED = ("qwen2_5_vl_vision", "qwen3_vl_vision")
# Patches: larger calls take the device longer than launching them takes the host.
SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048)
# Of a call, on average: batches with smaller frames or windows are launched as they are.
_LEAST_PATCHES = {"cu_seqlens": 64, "cu_window_seqlens": 8}
# What a tower takes of grids besides the patches, on its device.
InputsOf = Callable[[tuple[Grid, ...], torch.device], dict[str, Tensor]]
# Returns what repeats on the device all that a function does there: see `GraphMaker` of the stages.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


@torch.inference_mode()
def captured(family: Any, tower: Any, capture: Capture, max_patches: int) -> CapturedTower | None:
    """Captures small calls of a family's tower; None for one that cannot be, with a warning if it should."""
    model_type = getattr(getattr(tower, "config", None), "model_type", None)
    if model_type not in _CAPTURED:
        return None
    try:
        return CapturedTower(tower, family.tower_inputs, capture, max_patches)
    except RuntimeError as error:  # of a driver or a kernel
        reason = str(error).partition("\n")[0]
        logger.warning("calls of a %s tower are launched as they are, not replayed: %s", model_type, reason)
        return None


class CapturedTower(nn.Module):
    """Stands in for a tower: calls of at most the largest size are replayed, others are its own."""

    def __init__(self, tower: nn.Module, inputs_of: InputsOf, capture: Capture, max_patches: int) -> None:
        """Captures the sizes up to `max_patches`, the largest first: others use parts of its memory."""
        super().__init__()
        self.tower = tower
        sizes = [each for each in SIZES if each <= max_patches]
        self._calls = [_Call(tower, inputs_of, size, capture) for size in reversed(sizes)][::-1]

    @property
    def max_patches(self) -> int:
        """Returns the patches of the largest call that is replayed; 0 where none is."""
        return max((each.size for each in self._calls), default=0)

    def forward(self, patches: Tensor, grid_thw: Tensor, **inputs: Any) -> Any:
        """Returns what the tower does of patches [P, channels of a patch], in memory of the caller's own."""
        call = next((each for each in self._calls if len(patches) <= each.size), None)
        grids = tuple(Grid(*each) for each in grid_thw.tolist())
        if call is None or not call.place(grids):
            return self.tower(patches, grid_thw=grid_thw, **inputs)
        return call.run(patches)


class _Call:
    """Holds a captured call of `size` patches, and the memory that it reads."""

    def __init__(self, tower: Any, inputs_of: InputsOf, size: int, capture: Capture) -> None:
        self.size = size
        self._tower, self._inputs_of, self._device = tower, inputs_of, device_of(tower)
        weight, self._merge = tower.patch_embed.proj.weight, tower.config.spatial_merge_size
        self._patches = weight.new_zeros(size, weight[0].numel())
        self._grids: tuple[Grid, ...] = ()
        inputs = self._padded(())
        assert inputs is not None
        self._memory = {name: each.clone() for name, each in inputs.items()}
        self._outputs: tuple[Tensor, ...] = ()
        self._replay = capture(self._compute)

    def place(self, grids: tuple[Grid, ...]) -> bool:
        """Writes what the call reads of grids; returns False for one with too many frames or windows."""
        if grids == self._grids:
            return True
        inputs = self._padded(grids)
        if inputs is None:
            return False
        for name, memory in self._memory.items():
            memory.copy_(inputs[name])
        self._grids = grids
        return True

    def run(self, patches: Tensor) -> Any:
        self._patches[: len(patches)].copy_(patches)
        self._replay()
        rows, *layers = (each[: len(patches) // self._merge**2].clone() for each in self._outputs)
        return SimpleNamespace(pooler_output=rows, deepstack_features=layers)

    def _compute(self) -> None:
        inputs: dict[str, Any] = dict(self._memory)
        window = getattr(self._tower, "window_size", 0) // self._tower.config.patch_size
        for name, longest in (("cu_seqlens", self.size), ("cu_window_seqlens", window**2)):
            if name in inputs:
                inputs[name] = StaticRuns(inputs[name], longest)
        output = self._tower(self._patches, grid_thw=None, **inputs, return_dict=True)
        self._outputs = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))

    def _padded(self, grids: tuple[Grid, ...]) -> dict[str, Tensor] | None:
        """Returns the inputs of media and of what pads them; None for too many runs of patches."""
        missing = self.size - sum(each.num_patches for each in grids)
        padding = (Grid(1, self._merge, missing // self._merge),) if missing else ()
        inputs = dict(self._inputs_of((*grids, *padding), self._device))
        del inputs["grid_thw"]  # of which nothing is read beside the others
        for name in _LEAST_PATCHES.keys() & inputs.keys():
            room, ends = self.size // _LEAST_PATCHES[name] + 2, tuple(inputs[name].tolist())
            if len(ends) > room:
                return None
            inputs[name] = static_bounds((*ends, *[self.size] * (room - len(ends))), self._device)
        return inputs
