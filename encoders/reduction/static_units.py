"""Units that show what the unit before them showed are not encoded: their embeddings are known.

A tower attends within a unit only, so equal pixels give equal embeddings: with tolerance 0 nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from encoders.adapter import Embeddings, PatchRun


def static_units(values: Tensor, num_units: int, tolerance: float) -> Tensor:
    """int64 [num_units]: of each unit the number, among those to encode, of the one it looks like.

    values: [P, D], as preprocessed, as many rows for each unit. A unit is compared with the last one that is
    encoded, so that slow changes add up; it looks like it if no value differs by more than `tolerance`.
    """
    units = values.view(num_units, -1)
    owners, last = [0], units[0]
    for unit in units[1:]:
        is_static = bool((unit - last).abs().max() <= tolerance)
        owners.append(owners[-1] + (not is_static))
        last = last if is_static else unit
    return torch.tensor(owners)


def encode_moving(
    encode: Callable[[PatchRun], Embeddings], run: PatchRun, tolerance: float
) -> tuple[Embeddings, int]:
    """The embeddings of all units of a run, of which only those that move are encoded; how many are not."""
    num_units = run.grid.t
    owners = static_units(run.values, num_units, tolerance)
    is_encoded = torch.cat([torch.ones(1, dtype=torch.bool), owners.diff() > 0])
    num_encoded = int(is_encoded.sum())
    if num_encoded == num_units:
        return encode(run), 0
    values = run.values.view(num_units, -1)[is_encoded].view(-1, run.values.shape[1])
    encoded = encode(replace(run, values=values, grid=run.grid.cut(num_encoded)))
    repeated = [
        rows.view(num_encoded, -1, rows.shape[1])[owners].flatten(0, 1)
        for rows in (encoded.rows, *encoded.deepstack)
    ]
    return Embeddings(repeated[0], tuple(repeated[1:])), num_units - num_encoded
