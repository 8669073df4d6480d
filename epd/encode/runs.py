"""Cuts the groups of a long video into runs that several workers decode at once.

    groups   | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 |
    reader        0         1          0            1

A run is decoded as a stream of its own, from the keyframe before it: longer runs decode fewer frames twice,
shorter ones let later readers begin before the room for frames is used up by earlier runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MIN_RUN, _MAX_RUN = 4, 16
_RUNS_PER_READER = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive groups [start, stop) of a video, decoded by one reader."""

    start: int
    stop: int
    reader: int

    def __contains__(self, group: int) -> bool:
        return self.start <= group < self.stop


def plan_runs(num_groups: int, num_readers: int) -> tuple[Run, ...]:
    """Returns runs in order, without gaps, dealt to readers in turn; a short video is one run of reader 0.

    num_readers: workers that can read it now
    """
    if num_readers < 2 or num_groups < 2 * _MIN_RUN:
        return (Run(0, num_groups, 0),)
    length = math.ceil(num_groups / (num_readers * _RUNS_PER_READER))
    length = min(max(length, _MIN_RUN), _MAX_RUN)
    starts = range(0, num_groups, length)
    return tuple(
        Run(start, min(start + length, num_groups), number % num_readers)
        for number, start in enumerate(starts)
    )
