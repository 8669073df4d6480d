"""Encodes batches: the path from frames to embeddings.

Units of a video that look like the unit before are skipped if asked for: their embeddings are known. A tower
attends within a unit only, so equal pixels give equal embeddings: with tolerance 0 nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from epd.encoders.adapter import Adapter, Embeddings, PatchRun, TowerMerger, concatenated
from epd.encoders.device import device_of, to_device, to_host
from epd.encoders.plans import MediaPlan
from epd.errors import RequestError, UnsupportedModelError
from epd.reduction import TowerMerge, check_tolerance


def static_units(run: PatchRun, tolerance: float) -> Tensor:
    """Maps each unit to the number, among those to encode, of the unit it looks like: int64 [units].

    A unit is compared with the last one that is encoded, so that slow changes add up; it looks like it if no
    preprocessed value differs by more than `tolerance`. All tiles of an image and clips of sound are.
    """
    if run.kind != "video":
        return torch.arange(run.grid.t)
    units = _by_unit(run.values, run.grid.t)
    changes = list(_changes(units, tolerance))
    owners = torch.zeros(len(units), dtype=torch.int64)
    if changes:
        owners[1:] = to_host(torch.stack(changes)).cumsum(0)
    return owners


def _changes(units: Tensor, tolerance: float) -> Iterator[Tensor]:
    """Reports of each of units [U, ...] but the first whether it is to be encoded: bool [], on the device."""
    last, is_host = units[0], units.device.type == "cpu"
    for unit in units[1:]:
        is_new = ~((unit - last).abs().max() <= tolerance)
        yield is_new
        # On a device, a branch would wait for it.
        last = (unit if is_new else last) if is_host else torch.where(is_new, unit, last)


def encode_moving(
    encode_batch: Callable[[Sequence[PatchRun]], list[Embeddings]],
    runs: Sequence[PatchRun],
    tolerance: float | None,
) -> tuple[list[Embeddings], int]:
    """Encodes some runs, of which only units that change are encoded; returns also how many are not.

    encode_batch: called once. tolerance: see `static_units`; None to encode all units. Each run is looked at
    by itself, so what comes of it does not depend on the others.
    """
    if tolerance is None:
        return encode_batch(runs), 0
    owners = [static_units(run, tolerance) for run in runs]
    encoded = encode_batch([_moving(run, each) for run, each in zip(runs, owners, strict=True)])
    repeated = [_repeated(rows, each) for rows, each in zip(encoded, owners, strict=True)]
    return repeated, sum(len(each) - _num_encoded(each) for each in owners)


def _num_encoded(owners: Tensor) -> int:
    return int(owners[-1]) + 1


def _moving(run: PatchRun, owners: Tensor) -> PatchRun:
    """Returns the units to encode: the first of each owner's."""
    num_encoded = _num_encoded(owners)
    if num_encoded == len(owners):
        return run
    firsts = to_device(torch.searchsorted(owners, torch.arange(num_encoded)), run.values.device)
    values = _by_unit(run.values, len(owners))[firsts].flatten(0, 1)
    return replace(run, values=values, grid=run.grid.cut(num_encoded))


def _repeated(encoded: Embeddings, owners: Tensor) -> Embeddings:
    """Returns the embeddings of all units, from those that were encoded."""
    num_encoded = _num_encoded(owners)
    if num_encoded == len(owners):
        return encoded
    there = to_device(owners, encoded.rows.device)
    return encoded.mapped(lambda rows: _by_unit(rows, num_encoded)[there].flatten(0, 1))


def _by_unit(rows: Tensor, num_units: int) -> Tensor:
    """Reshapes [rows, ...] to [units, rows of each, ...]."""
    return rows.reshape(num_units, -1, *rows.shape[1:])


class FrameEncoder:
    """Encodes frames with a family's tower, for every stage that encodes.

    num_skipped: units so far that were not encoded.
    skip_static: the tolerance within which a unit of a video looks like the one before it, and is not
    encoded; None to encode all. See `epd.encoders.batch`.
    merge: how many tokens later layers of the tower compute; None for as many as requests ask for.
    max_patches: in one call of the tower; None for any number. See `unit_pieces`.
    captured: called in the tower's place where nothing is merged; see `CapturedTower`.
    """

    def __init__(
        self,
        family: Adapter,
        tower: nn.Module,
        skip_static: float | None = None,
        merge: TowerMerge | None = None,
        max_patches: int | None = None,
        captured: nn.Module | None = None,
    ) -> None:
        """Raises RequestError for an invalid tolerance, and what `Adapter.tower_merger` raises."""
        check_tolerance(skip_static)
        self.num_skipped = 0
        self.family = family
        self._device = device_of(tower)
        self._tower = tower
        self._merge = merge
        self._merger = None if merge is None or merge.share == 1 else family.tower_merger(tower, merge)
        self._skip_static = skip_static
        self.max_patches = max_patches
        self._captured = captured

    @property
    def is_by_unit(self) -> bool:
        """Returns whether a video's units are encoded as they are, whatever others are beside them."""
        return not self._skip_static and self._merger is None

    def patches(self, frames: Tensor, plan: MediaPlan) -> PatchRun:
        """Prepares frames, uint8 [N, h, w, 3] on the host, for the tower. plan: of their units alone."""
        return PatchRun(plan.kind, self.family.preprocess(frames, plan, self._device), plan.grid)

    def encode(self, runs: Sequence[PatchRun], tower_share: float | None = None) -> list[Embeddings]:
        """Encodes several runs of equal grid height and width: in one call of the tower, if it takes so many.

        Else each run by itself, in pieces of whole units, so that what the tower holds stays bounded.
        tower_share: of tokens, that later layers are asked to compute; None for all. A tower that cannot
        merge, or has a share of its own, leaves it.
        """
        encode_batch = partial(self._encode_batch, self._merger_of(tower_share))
        embeddings, num_skipped = encode_moving(encode_batch, runs, self._skip_static)
        self.num_skipped += num_skipped
        return embeddings

    def _merger_of(self, tower_share: float | None) -> TowerMerger | None:
        if self._merge is not None or tower_share is None:
            return self._merger
        try:
            return self.family.tower_merger(self._tower, TowerMerge(tower_share))
        except (UnsupportedModelError, RequestError):  # a family that cannot, or a tower of one layer
            return None

    def _encode_batch(self, merger: TowerMerger | None, runs: Sequence[PatchRun]) -> list[Embeddings]:
        if self.max_patches is None or sum(run.grid.num_patches for run in runs) <= self.max_patches:
            return self._call(merger, runs)
        pieces = [unit_pieces(run, self.max_patches) for run in runs]
        return [concatenated([self._call(merger, [piece])[0] for piece in each]) for each in pieces]

    def _call(self, merger: TowerMerger | None, runs: Sequence[PatchRun]) -> list[Embeddings]:
        if merger is None:
            return self.family.encode_batch(self._captured or self._tower, runs)
        with merger.during(runs):
            return self.family.encode_batch(self._tower, runs)


def unit_pieces(run: PatchRun, max_patches: int) -> list[PatchRun]:
    """Cuts a run into pieces of whole units with at most this number of patches, or of one unit.

    13 tiles of 1,024 patches, 4,096 at most     [0, 4) [4, 8) [8, 12) [12, 13)
    """
    num_units, of_unit = run.grid.t, run.grid.cut(1).num_patches
    step, rows = max(1, max_patches // of_unit), len(run.values) // num_units
    return [
        replace(
            run,
            values=run.values[start * rows : (start + step) * rows],
            grid=run.grid.cut(min(step, num_units - start)),
        )
        for start in range(0, num_units, step)
    ]
