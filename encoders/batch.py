"""Encodes batches: its interface to a model family, and the path from frames to embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from epd.encoders.adapter import Embeddings, MediaPlan, PatchRun, TowerMerger, concatenated
from epd.encoders.device import CPU, device_of
from epd.encoders.reduction.static_units import encode_moving
from epd.reduction import TowerMerge, check_tolerance


class BatchEncoder(Protocol):
    """Declares the part of an `Adapter` that runs on an encode worker."""

    def preprocess(self, frames: Tensor, plan: MediaPlan, device: torch.device = CPU) -> Tensor:
        """Turns frames of planned size, uint8 [N, h, w, 3], into what the vision tower takes on a device."""
        ...

    def encode_batch(self, tower: nn.Module, runs: Sequence[PatchRun]) -> list[Embeddings]:
        """Encodes several runs of whole units, of equal grid height and width, in one call of the tower."""
        ...

    def tower_merger(self, tower: nn.Module, merge: TowerMerge) -> TowerMerger:
        """Returns what merges neighbours inside of the tower.

        Raises UnsupportedModelError for a tower where it cannot, RequestError for a layer that it lacks.
        """
        ...

    def join(self, embeddings: Embeddings, plan: MediaPlan, start: int, stop: int) -> Embeddings:
        """See `Adapter`."""
        ...


class FrameEncoder:
    """Encodes frames with a family's tower, for every stage that encodes.

    num_skipped: units so far that were not encoded.
    skip_static: the tolerance within which a unit of a video looks like the one before it, and is not
    encoded; None to encode all. See `epd.encoders.reduction.static_units`.
    merge: how many tokens later layers of the tower compute; None for all.
    max_patches: in one call of the tower; None for any number. See `unit_pieces`.
    """

    def __init__(
        self,
        family: BatchEncoder,
        tower: nn.Module,
        skip_static: float | None = None,
        merge: TowerMerge | None = None,
        max_patches: int | None = None,
    ) -> None:
        """Raises RequestError for an invalid tolerance, and what `BatchEncoder.tower_merger` raises."""
        check_tolerance(skip_static)
        self.num_skipped = 0
        self._family = family
        self._device = device_of(tower)
        self._tower = tower
        self._merger = None if merge is None else family.tower_merger(tower, merge)
        self._skip_static = skip_static
        self._max_patches = max_patches

    def patches(self, frames: Tensor, plan: MediaPlan) -> PatchRun:
        """Prepares frames, uint8 [N, h, w, 3] on the host, for the tower. plan: of their units alone."""
        return PatchRun(plan.kind, self._family.preprocess(frames, plan, self._device), plan.grid)

    def encode(self, runs: Sequence[PatchRun]) -> list[Embeddings]:
        """Encodes several runs of equal grid height and width: in one call of the tower, if it takes so many.

        Else each run by itself, in pieces of whole units, so that what the tower holds stays bounded.
        """
        embeddings, num_skipped = encode_moving(self._encode_batch, runs, self._skip_static)
        self.num_skipped += num_skipped
        return embeddings

    def _encode_batch(self, runs: Sequence[PatchRun]) -> list[Embeddings]:
        if self._max_patches is None or sum(run.grid.num_patches for run in runs) <= self._max_patches:
            return self._call(runs)
        limit = self._max_patches
        return [concatenated([self._call([piece])[0] for piece in unit_pieces(run, limit)]) for run in runs]

    def _call(self, runs: Sequence[PatchRun]) -> list[Embeddings]:
        with nullcontext() if self._merger is None else self._merger.during(runs):
            return self._family.encode_batch(self._tower, runs)


def unit_pieces(run: PatchRun, max_patches: int) -> list[PatchRun]:
    """Cuts a run into pieces of whole units with at most this number of patches, or of one unit.

    13 tiles of 1,024 patches, 4,096 at most     [0, 4) [4, 8) [8, 12) [12, 13)
    """
    num_units, of_unit = run.grid.t, run.grid.h * run.grid.w
    step, rows = max(1, max_patches // of_unit), len(run.values) // num_units
    return [
        replace(
            run,
            values=run.values[start * rows : (start + step) * rows],
            grid=run.grid.cut(min(step, num_units - start)),
        )
        for start in range(0, num_units, step)
    ]
