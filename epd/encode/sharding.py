"""Cuts a video into groups, chooses the encoder of each and those it takes together, live and simulated.

    units          |  0   1   2   3   4   5   6   7 |  8   9  10  11  12  13  14  15 | 16  ...
    whole video     [ 0   1 )[ 2   3   4   5   6   7 )[  8 ...                     15 )[ 16 ...
    clip from 5                         [ 5 )[ 6   7 )[  8 ...                     15 )[ 16 ...

Groups end on a lattice of the video's own time, so that overlapping clips have groups in common. The first
group may be a small one, on a lattice of its own, so that encoding and prefill begin early. Encoders are
chosen by the kind of sharding:

groups     each to the least loaded encoder: intra-request parallelism (EPD, section 3.2)
request    all of a request to one encoder, as long as it is available
local      to the worker that prefills them

Encoders can drop tokens before they send groups to another worker. Then the groups of a reading, of which
what is kept depends on each other, go to one encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, Protocol

from epd.encode.encoder_cache import GroupKey

# Visual tokens that are encoded and prefilled together, about. Encoders take several groups that wait in one
# call, so larger groups only come later: docs/encoders.md has what the simulator says.
GROUP_TOKENS = 256
# Of the first group of a video, at most.
FIRST_GROUP_TOKENS = 256
Sharding = Literal["groups", "request", "local"]


def units_of(num_tokens: int, tokens_per_unit: int) -> int:
    """Returns the units that have about as many tokens: one at least."""
    return max(1, num_tokens // tokens_per_unit)


def cut_units(
    num_units: int, group_units: int, first_units: int, lattice_index: int = 0
) -> list[tuple[int, int]]:
    """Cuts units into half-open runs, without gaps, of at most `group_units` and at least one.

    first_units: of the first run, at most.
    lattice_index: of the first unit, counted from the start of the source.
    """
    whole = _next_end(lattice_index, group_units)
    first = min(_next_end(lattice_index, first_units), whole)
    ends = {first - lattice_index, *range(whole - lattice_index, num_units, group_units)}
    starts = [0, *sorted(end for end in ends if end < num_units)]
    return list(zip(starts, [*starts[1:], num_units], strict=True))


def _next_end(index: int, size: int) -> int:
    """Returns the first end of a cell of the lattice behind a unit."""
    return (index // size + 1) * size


def wanted_encoder(sharding: Sharding, prefill_worker: str, last_encoder: str | None) -> str | None:
    """Returns the encoder that should take the next group, if it takes work; None for the least loaded.

    last_encoder: encoder of the request's last dispatched group, if any
    """
    match sharding:
        case "local":
            return prefill_worker
        case "request":
            return last_encoder
    return None


def sends_groups(sharding: Sharding, encoders: Collection[str], prefill_worker: str) -> bool:
    """Returns whether groups go from encoders to another worker. encoders: those that take work"""
    if not encoders or (sharding == "local" and prefill_worker in encoders):
        return False
    return set(encoders) != {prefill_worker}


# Patches that the tower takes together.
DEFAULT_BATCH_PATCHES = 4096
# By the type of the device: a GPU launches hundreds of kernels for a call of the tower, whatever it encodes.
BATCH_PATCHES: Mapping[str, int] = {"cpu": DEFAULT_BATCH_PATCHES, "cuda": 16_384}


class WaitingGroup(Protocol):
    """Is what the batch policy sees of a group that waits for an encoder."""

    @property
    def key(self) -> GroupKey: ...

    @property
    def shape(self) -> tuple[object, ...]:
        """Returns what groups must have in common to share one call of the tower."""
        ...

    @property
    def num_patches(self) -> int: ...


def pick_batch(waiting: Iterable[WaitingGroup], max_patches: int) -> list[int]:
    """Returns ascending indices of the groups to encode next; a group larger than the budget goes alone.

    The oldest group comes first and is always taken, so none starves; of groups with equal keys only the
    first is taken, since it serves all.
    """
    shape: tuple[object, ...] | None = None
    picked: list[int] = []
    keys: set[GroupKey] = set()
    filled = 0
    for index, group in enumerate(waiting):
        shape = group.shape if shape is None else shape
        if group.shape != shape or group.key in keys:
            continue
        if picked and filled + group.num_patches > max_patches:
            break
        picked.append(index)
        keys.add(group.key)
        filled += group.num_patches
    return picked
