"""Runs tasks in the simulator, each on a device of its own.

What is left of a task may change while it runs: see `set_left`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from epd.simulate.clock import EventPriority, EventQueue

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
