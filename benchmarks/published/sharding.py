"""Cuts one request's images into shards by patches, one per encoder, as in the EPD paper (section 3.2).

All groups must be ready. They are cut into one run per encoder, or dispatched in short runs:

    groups                | 0  1  2  3  4  5  6  7 |
    plan_shards           [ e0   )[ e1    )[  e2   )      one run each, the largest as small as possible
    plan_shards, max_run  [ e0 )[ e1)[ e2)[ e0)[e1 )      runs to the encoder with the least outstanding

The published rows are simulated with this. The server, and the simulator otherwise, dispatch each group when
its frames are there: see `epd.encode.sharding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Covers groups [start, stop) of one request, in order, with the patches of all of them together."""

    start: int
    stop: int
    num_patches: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a run needs at least one group, got [{self.start}, {self.stop})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Lists the runs of one request for one encoder, in order."""

    encoder: int
    runs: tuple[GroupRun, ...]

    @property
    def num_patches(self) -> int:
        return sum(run.num_patches for run in self.runs)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(index for run in self.runs for index in range(run.start, run.stop))


def plan_shards(
    group_patches: Sequence[int],
    outstanding_patches: Sequence[int],
    *,
    max_run_patches: int | None = None,
) -> tuple[Shard, ...]:
    """Assigns every group to one encoder; encoders without groups are left out.

    group_patches: of each group, in order
    outstanding_patches: already waiting at each encoder
    max_run_patches: largest run to dispatch (one group may be larger); without it, one run each
    """
    _check(group_patches, outstanding_patches, max_run_patches)
    if max_run_patches is None:
        assigned = _one_run_each(group_patches, outstanding_patches)
    else:
        assigned = _assigned(group_patches, outstanding_patches, max_run_patches)
    runs: dict[int, list[GroupRun]] = {}
    for encoder, run in assigned:
        runs.setdefault(encoder, []).append(run)
    return tuple(Shard(encoder, tuple(runs[encoder])) for encoder in sorted(runs))


def one_run_each(group_patches: Sequence[int], outstanding_patches: Sequence[int]) -> list[int]:
    """Returns the encoder of each group, where each encoder gets one run."""
    encoders = [0] * len(group_patches)
    for shard in plan_shards(group_patches, outstanding_patches):
        for group in shard.groups:
            encoders[group] = shard.encoder
    return encoders


def imbalance(shards: Sequence[Shard], num_encoders: int) -> float:
    """Returns the patches of the largest shard over the mean of all encoders; 1.0 is perfect."""
    total = sum(shard.num_patches for shard in shards)
    return max(shard.num_patches for shard in shards) * num_encoders / total


def least_loaded(outstanding_patches: Sequence[int]) -> int:
    """Returns the encoder with the least outstanding patches, the first of equals."""
    return min(range(len(outstanding_patches)), key=outstanding_patches.__getitem__)


def _check(patches: Sequence[int], outstanding: Sequence[int], max_run: int | None) -> None:
    if not outstanding:
        raise ValueError("groups cannot be planned for 0 encoders; at least 1 is needed")
    if any(count < 1 for count in patches):
        raise ValueError(f"every group needs at least 1 patch, got {list(patches)}")
    if any(count < 0 for count in outstanding):
        raise ValueError(f"outstanding patches cannot be negative, got {list(outstanding)}")
    if max_run is not None and max_run < 1:
        raise ValueError(f"max_run_patches must be at least 1, got {max_run}")


def _one_run_each(patches: Sequence[int], outstanding: Sequence[int]) -> list[tuple[int, GroupRun]]:
    """Assigns least loaded encoders first; finds the lowest level that all groups fit under, by bisection."""
    encoders = sorted(range(len(outstanding)), key=lambda encoder: (outstanding[encoder], encoder))
    loads = [outstanding[encoder] for encoder in encoders]
    low, high = 0, loads[0] + sum(patches)
    while low < high:
        level = (low + high) // 2
        if len(_filled(patches, loads, level)) == len(patches):
            high = level
        else:
            low = level + 1
    places = _filled(patches, loads, high)
    return [
        (encoders[place], _run(patches, places.index(place), places.index(place) + places.count(place)))
        for place in dict.fromkeys(places)
    ]


def _filled(patches: Sequence[int], loads: Sequence[int], level: int) -> list[int]:
    """Returns places of the first groups, in order, when no encoder may exceed `level`; fewer if full."""
    places: list[int] = []
    place = filled = 0
    for count in patches:
        while place < len(loads) and loads[place] + filled + count > level:
            place, filled = place + 1, 0
        if place == len(loads):
            return places
        places.append(place)
        filled += count
    return places


def _assigned(patches: Sequence[int], outstanding: Sequence[int], max_run: int) -> list[tuple[int, GroupRun]]:
    loads = list(outstanding)
    assigned = []
    for run in _runs(patches, max_run):
        encoder = least_loaded(loads)
        loads[encoder] += run.num_patches
        assigned.append((encoder, run))
    return assigned


def _runs(patches: Sequence[int], max_run: int) -> list[GroupRun]:
    runs: list[GroupRun] = []
    start = filled = 0
    for index, count in enumerate(patches):
        if index > start and filled + count > max_run:
            runs.append(_run(patches, start, index))
            start, filled = index, 0
        filled += count
    return [*runs, _run(patches, start, len(patches))] if patches else runs


def _run(patches: Sequence[int], start: int, stop: int) -> GroupRun:
    return GroupRun(start, stop, sum(patches[start:stop]))
