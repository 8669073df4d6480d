"""Fills groups of frames: decides where each decoded frame goes, and what replaces a missing one.

    asked     |  0   1   2   3 |  4   5   6   7 |  8   9 |     in the order asked
    group     [   0: taken    )[ 1: being filled)[ 2 ... )     half-open; at most `ahead` groups are in memory

Not safe for threads by itself: the caller holds a lock, except for `GroupBuffer.data`, where every frame has
its own rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from epd.errors import CorruptMediaError
from epd.types import FrameGroup, Frames, UInt8Array
from epd.video.decoding.pixels import Size


class GroupBuffer:
    """One group: the wanted frames [start, stop)."""

    def __init__(self, index: int, start: int, stop: int) -> None:
        self.index, self.start, self.stop = index, start, stop
        self.num_pending = stop - start
        self.data: UInt8Array | None = None  # uint8 [stop - start, H, W, 3]
        self.pts_s = np.full(stop - start, np.nan)
        self.is_missing = np.zeros(stop - start, dtype=bool)
        self.is_substituted = np.zeros(stop - start, dtype=bool)

    @property
    def is_complete(self) -> bool:
        """Whether each of its frames is written or known to be missing."""
        return self.num_pending == 0

    def rows(self, size: Size) -> UInt8Array:
        """Returns the memory of the group, made at the first call."""
        if self.data is None:
            self.data = np.empty((self.stop - self.start, *size, 3), np.uint8)
        return self.data

    def first_good(self) -> int | None:
        """Returns the place within the group of its first frame that is not missing."""
        good = np.flatnonzero(~self.is_missing)
        return int(good[0]) if len(good) else None


class GroupRing:
    """Holds all groups of one request, of which only those in flight have memory.

    targets: wanted timestamps in the order asked.
    ahead: how many groups beyond those taken may be filled; None: all.
    """

    def __init__(self, targets: Sequence[int], sizes: Sequence[int], ahead: int | None) -> None:
        bounds = [0, *accumulate(sizes)]
        self.groups: list[GroupBuffer | None] = [
            GroupBuffer(i, *span) for i, span in enumerate(pairwise(bounds))
        ]
        self.num_frames = len(targets)
        self.num_substituted = 0
        self.num_taken = 0
        self._starts = bounds[:-1]
        self._ahead = ahead
        self._places: dict[int, list[int]] = {}
        for place, target in enumerate(targets):
            self._places.setdefault(target, []).append(place)
        self._open_targets = set(self._places)
        self._last_good: tuple[UInt8Array, float] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every target has been judged."""
        return not self._open_targets

    @property
    def open_targets(self) -> list[int]:
        """Targets without a frame yet, in order."""
        return sorted(self._open_targets)

    def group_of(self, target: int) -> int:
        """Returns the first group that needs the frame at a target."""
        return bisect_right(self._starts, self._places[target][0]) - 1

    def has_room(self, target: int) -> bool:
        """Returns whether the group of a target may be filled already."""
        return self._ahead is None or self.group_of(target) < self.num_taken + self._ahead

    def slots(self, target: int) -> Iterator[tuple[GroupBuffer, int]]:
        """Yields every (group, row within it) that shows the frame at a target."""
        for place in self._places[target]:
            group = self.groups[bisect_right(self._starts, place) - 1]
            if group is not None:
                yield group, place - group.start

    def settle(self, target: int, pts_s: float | None, is_substitute: bool) -> bool:
        """Note that a target's rows are written (no `pts_s`: missing); says whether a group is complete."""
        if target not in self._open_targets:
            return False
        self._open_targets.discard(target)
        has_completed = False
        for group, row in self.slots(target):
            group.pts_s[row] = math.nan if pts_s is None else pts_s
            group.is_missing[row] = pts_s is None
            group.is_substituted[row] = is_substitute or pts_s is None
            group.num_pending -= 1
            self.num_substituted += bool(group.is_substituted[row])
            has_completed |= group.is_complete
        return has_completed

    def take(self, times_s: Sequence[float], size: Size) -> FrameGroup:
        """Returns the next group, which must be fillable; its memory now belongs to the caller."""
        group = self.groups[self.num_taken]
        assert group is not None
        self.fill(group, size)
        self.groups[self.num_taken] = None
        self.num_taken += 1
        times = times_s[group.start : group.stop]
        substituted = tuple(float(t) for t, flag in zip(times, group.is_substituted, strict=True) if flag)
        return FrameGroup(group.index, group.start, Frames(group.rows(size), group.pts_s, substituted))

    def can_fill(self, group: GroupBuffer) -> bool:
        """Returns whether a complete group has, or can be lent, a good frame for each missing one."""
        return not group.is_missing.any() or self._lender(group) is not None

    def fill(self, group: GroupBuffer, size: Size) -> None:
        """Put the nearest good frame in the place of each missing one."""
        lent = self._lender(group)
        if group.is_missing.any() and lent is None:
            raise CorruptMediaError(
                f"no frame could be decoded near {group.stop - group.start} wanted times; "
                "allowed: a readable file; copy or encode it again"
            )
        rows = group.rows(size)
        for row in range(group.stop - group.start):
            if group.is_missing[row]:
                assert lent is not None
                rows[row], group.pts_s[row] = lent
            else:
                lent = rows[row], float(group.pts_s[row])
        if lent is not None:
            self._last_good = lent[0].copy(), lent[1]

    def _lender(self, group: GroupBuffer) -> tuple[UInt8Array, float] | None:
        """Returns the good frame nearest before the group, or else the first one after its beginning."""
        if self._last_good is not None:
            return self._last_good
        for later in self.groups[group.index :]:
            row = later.first_good() if later is not None and later.is_complete else None
            if later is not None and row is not None and later.data is not None:
                return later.data[row], float(later.pts_s[row])
        return None


def cut_groups(num_frames: int, group_size: int, first_group_size: int) -> tuple[int, ...]:
    """Returns sizes of groups that add up to `num_frames`: a small first one, then equal ones."""
    first = min(first_group_size, num_frames)
    rest, tail = divmod(num_frames - first, group_size)
    return tuple(size for size in (first, *[group_size] * rest, tail) if size)
