"""A model family without a model: what an encoder makes of a frame can be told from its first byte."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from epd.encode.encoder_cache import GroupKey
from epd.encoders.adapter import Embeddings, PatchRun, TowerMerger
from epd.encoders.device import CPU, to_device
from epd.encoders.plans import Grid, MediaPlan
from epd.reduction import TowerMerge

NUM_CHANNELS = 2
POISON = 255


class FakeFamily:
    """Each unit is one frame and gives NUM_CHANNELS equal values; a frame of POISON cannot be encoded."""

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def preprocess(
        self,
        frames: Tensor,
        plan: MediaPlan,  # noqa: ARG002 # a family has one
        device: torch.device = CPU,
    ) -> Tensor:
        return to_device(frames[:, 0, 0, 0], device).to(torch.float32)

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:  # noqa: ARG002
        if any(bool((run.values == POISON).any()) for run in runs):
            raise RuntimeError("this frame cannot be encoded")
        self.batch_sizes.append(len(runs))
        return [Embeddings(run.values[:, None].expand(-1, NUM_CHANNELS).clone()) for run in runs]

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:
        raise AssertionError(f"no tower to merge in: {tower}, {merge}")

    def join(self, embeddings: Embeddings, plan: MediaPlan, start: int, stop: int) -> Embeddings:  # noqa: ARG002
        return embeddings


def fake_plan(num_units: int, side: int = 1) -> MediaPlan:
    """A video of one frame a unit. side: makes for another shape."""
    times = tuple(float(unit) for unit in range(num_units))
    return MediaPlan("video", (side, side), Grid(num_units, 1, 1), 1, 1, times_s=times)


def fake_key(value: int, num_units: int) -> GroupKey:
    return GroupKey(f"video {value}", tuple(float(unit) for unit in range(num_units)), (0, 0), (1, 1), "fake")


def fake_frames(value: int, num_units: int, side: int = 1) -> Tensor:
    return torch.full((num_units, side, side, 3), value, dtype=torch.uint8)
