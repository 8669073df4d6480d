"""Runs tasks: each on a device of its own, or all on the cores of one machine.

    own devices     a task takes as long as it takes
    shared cores    n tasks on c cores: each runs at min(1, c / n) of its speed

With equal speeds for all, one clock is enough: it runs as fast as any task, and a task ends when the
clock has advanced by its length. What is left of a task may change while it runs: see `set_left`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Literal

from epd.profiles.host import HostCosts
from epd.simulate.clock import EventPriority, EventQueue, ticks_of
from epd.types import ceil_div

Then = Callable[[], None]
OverheadName = Literal["request", "split", "media", "image", "video", "sent", "second", "end"]
_CORE = 1000  # shares of one core


class SimulatedTask:
    """Is work under way. end: on the clock of its machine; version: of the event that ends it."""

    __slots__ = ("done", "end", "version")

    def __init__(self, end: int, done: Then) -> None:
        self.end = end
        self.done = done
        self.version = 0


class OwnDevices:
    """Runs each task without contention. work_ticks: of all tasks so far."""

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


class SharedCores:
    """Shares all cores of a machine, except the use of the idle application."""

    def __init__(self, events: EventQueue, costs: HostCosts) -> None:
        self.work_ticks = 0
        self._costs = costs
        self._events = events
        self._capacity = round(_CORE * (costs.num_cores - costs.idle_cores))
        # By the clock at which they end, some out of date.
        self._tasks: list[tuple[int, int, SimulatedTask]] = []
        self._num_tasks = 0
        self._turns: deque[tuple[OverheadName, Then]] = deque()  # the first has its turn
        self._clock = 0
        self._seen = 0
        self._num_pushed = 0
        self._version = 0

    def run(self, ticks: int, done: Then) -> SimulatedTask:
        self._go_on()
        self.work_ticks += ticks
        self._num_tasks += 1
        task = SimulatedTask(self._clock + ticks, done)
        self._push(task)
        return task

    def left(self, task: SimulatedTask) -> int:
        self._go_on()
        return task.end - self._clock

    def set_left(self, task: SimulatedTask, ticks: int) -> None:
        self._go_on()
        task.end = self._clock + ticks
        self._push(task)

    def _push(self, task: SimulatedTask) -> None:
        self._num_pushed += 1
        task.version = self._num_pushed
        heappush(self._tasks, (task.end, task.version, task))
        self._plan()

    def spend(self, names: tuple[OverheadName, ...], then: Then) -> None:
        """Runs costs of the application, by their names in `HostCosts`; then the continuation."""
        overheads = [getattr(self._costs, name) for name in names]
        beside = ticks_of(sum(each.beside_s for each in overheads))
        if beside:
            self.run(beside, _nothing)
        at = self._events.now + ticks_of(sum(each.delay_s for each in overheads))
        work = ticks_of(sum(each.work_s for each in overheads))
        self._events.push(at, EventPriority.END, partial(self.run, work, then))

    def spend_in_turn(self, name: OverheadName, then: Then) -> None:
        """Runs the same in the one process that hands over media: one group after the other."""
        self._turns.append((name, then))
        if len(self._turns) == 1:
            self.spend((name,), self._end_turn)

    def _end_turn(self) -> None:
        _, then = self._turns.popleft()
        if self._turns:
            self.spend((self._turns[0][0],), self._end_turn)
        then()

    def send_tokens(self, num_tokens: int) -> None:
        """Sends output tokens to clients, off the critical path of everything else."""
        if num_tokens and self._costs.token_s:
            self.run(num_tokens * ticks_of(self._costs.token_s), _nothing)

    def _go_on(self) -> None:
        """Advances the clock to now."""
        elapsed, self._seen = self._events.now - self._seen, self._events.now
        self._clock += min(elapsed, elapsed * self._capacity // (_CORE * max(1, self._num_tasks)))

    def _plan(self) -> None:
        """Plans when the first task will end if no other comes."""
        self._version += 1
        while self._tasks and self._tasks[0][1] != self._tasks[0][2].version:
            heappop(self._tasks)
        if self._tasks:
            left = max(0, self._tasks[0][0] - self._clock)
            ticks = max(left, ceil_div(left * _CORE * self._num_tasks, self._capacity))
            self._events.push(self._events.now + ticks, EventPriority.END, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._go_on()
        _, _, task = heappop(self._tasks)
        self._num_tasks -= 1
        self._plan()
        task.done()


def _nothing() -> None:
    """Does nothing, as the action after background work."""


Machine = OwnDevices | SharedCores
