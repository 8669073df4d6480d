"""Keeps simulated time in whole picoseconds, and its events in an order that is always the same.

Events at the same instant happen by rank, then in the order in which they were planned:

    END      work that ends, transfers that arrive: their results are there ...
    POLICY   ... when controllers look,
    ARRIVAL  ... when requests come,
    START    ... and when workers choose the next work, with all of that in view

Whole numbers add up to the same sum in any order, so that steps may be combined and end at the very instant
at which single steps would.

Tasks run each on a device of its own. What is left of one may change while it runs: see `set_left`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush
from typing import Literal

from epd.control.elasticity.cluster import StageSample

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


Then = Callable[[], None]
OverheadName = Literal["request", "split", "media", "image", "video", "sent", "second", "end"]


class SimulatedTask:
    """Is work under way. end: on the clock of its machine; version: of the event that ends it."""

    __slots__ = ("done", "end", "version")

    def __init__(self, end: int, done: Then) -> None:
        self.end = end
        self.done = done
        self.version = 0


class Machine:
    """Runs each task without contention, and the application's part in no time: another may count it.

    work_ticks: of all tasks so far.
    """

    def __init__(self, events: EventQueue) -> None:
        self.work_ticks = 0
        self._events = events

    def run(self, ticks: int, done: Then) -> SimulatedTask:
        self.work_ticks += ticks
        task = SimulatedTask(self._events.now + ticks, done)
        self._events.push(task.end, EventPriority.END, partial(self._end, task, 0))
        return task

    def left(self, task: SimulatedTask) -> int:
        """Returns the ticks of work that a task has left."""
        return task.end - self._events.now

    def set_left(self, task: SimulatedTask, ticks: int) -> None:
        """Gives a task under way more or less to do than it had left."""
        task.end = self._events.now + ticks
        task.version += 1
        self._events.push(task.end, EventPriority.END, partial(self._end, task, task.version))

    @staticmethod
    def _end(task: SimulatedTask, version: int) -> None:
        if version == task.version:
            task.done()

    def spend(self, names: tuple[OverheadName, ...], then: Then) -> None:  # noqa: ARG002 - not simulated
        then()

    def spend_in_turn(self, name: OverheadName, then: Then) -> None:  # noqa: ARG002 - not simulated
        then()

    def send_tokens(self, num_tokens: int) -> None:
        """Costs nothing."""


@dataclass(slots=True)
class WorkDone:
    """Holds totals since the worker took the role: units, rounds, and ticks spent on them."""

    units: int = 0
    rounds: int = 0
    ticks: int = 0

    def add(self, units: int, ticks: int, rounds: int = 1) -> None:
        """Adds rounds in which some work was done."""
        if units:
            self.units += units
            self.rounds += rounds
            self.ticks += ticks

    def sample(self, num_requests: int, queued_units: int = 0) -> StageSample:
        return StageSample(num_requests, queued_units, self.units, self.rounds, seconds_of(self.ticks))
