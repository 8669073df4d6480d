"""Skips encoding units of a video that look like the unit before: their embeddings are known.

A tower attends within a unit only, so equal pixels give equal embeddings: with tolerance 0 nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epd.encoders.adapter import Embeddings, PatchRun
from epd.encoders.device import to_device, to_host


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
