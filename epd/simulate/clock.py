"""Keeps simulated time in whole picoseconds, and its events in an order that is always the same.

Events at the same instant happen by rank, then in the order in which they were planned:

    END      work that ends, transfers that arrive: their results are there ...
    POLICY   ... when controllers look,
    ARRIVAL  ... when requests come,
    START    ... and when workers choose the next work, with all of that in view

Whole numbers add up to the same sum in any order, so that steps may be combined and end at the very instant
at which single steps would.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush

TICKS_PER_S = 10**12


class EventPriority(IntEnum):
    """Orders events at the same instant."""

    END = 0
    POLICY = 1
    ARRIVAL = 2
    START = 3


def ticks_of(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def seconds_of(ticks: int) -> float:
    return ticks / TICKS_PER_S


class EventQueue:
    """Holds planned events. now: ticks since the start, the time of the last event that happened."""

    def __init__(self) -> None:
        self.now = 0
        self.num_happened = 0
        self._events: list[tuple[int, int, int, Callable[[], object]]] = []
        self._num_planned = 0

    def __len__(self) -> int:
        return len(self._events)

    def push(self, time: int, rank: EventPriority, action: Callable[[], object]) -> None:
        """Plans an event. Raises ValueError for one in the past."""
        if time < self.now:
            raise ValueError(f"an event at tick {time} cannot be planned at tick {self.now}")
        self._num_planned += 1
        heappush(self._events, (time, rank, self._num_planned, action))

    def step(self) -> bool:
        """Runs the next event; returns False without one."""
        if not self._events:
            return False
        self.now, _, _, action = heappop(self._events)
        self.num_happened += 1
        action()
        return True
