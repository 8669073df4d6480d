"""Picks waiting groups that an encoder takes together: of one shape, in a patch budget, oldest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from epd.encode.encoder_cache import GroupKey

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
