"""Runs tasks: each on a device of its own, or all on the cores of one machine.

    own devices     a task takes as long as it takes
    shared cores    n tasks on c cores: each runs at min(1, c / n) of its speed

With equal speeds for all, one clock is enough: it runs as fast as any task, and a task ends when the
clock has advanced by its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Literal, Protocol

from epd.profiles.host import HostCosts
from epd.simulate.clock import EventQueue, Rank, ticks_of
from epd.types import ceil_div

Then = Callable[[], None]
OverheadName = Literal["request", "split", "media", "image", "video", "sent", "second"]
_CORE = 1000  # shares of one core


class Machine(Protocol):
    """Runs tasks of a given number of ticks."""

    @property
    def work_ticks(self) -> int:
        """Returns the work of all tasks so far."""
        ...

    def run(self, ticks: int, done: Then) -> None: ...

    def spend(self, names: tuple[OverheadName, ...], then: Then) -> None:
        """Runs costs of the application, by their names in `HostCosts`; then the continuation."""
        ...

    def spend_in_turn(self, name: OverheadName, then: Then) -> None:
        """Runs the same in the one process that hands over media: one group after the other."""
        ...

    def send_tokens(self, num_tokens: int) -> None:
        """Sends output tokens to clients, off the critical path of everything else."""
        ...


class OwnDevices:
    """Runs each task without contention."""

    def __init__(self, events: EventQueue) -> None:
        self.work_ticks = 0
        self._events = events

    def run(self, ticks: int, done: Then) -> None:
        self.work_ticks += ticks
        self._events.push(self._events.now + ticks, Rank.END, done)

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
        self._tasks: list[tuple[int, int, Then]] = []  # by the clock at which they end
        self._turns: deque[tuple[OverheadName, Then]] = deque()  # the first has its turn
        self._clock = 0
        self._seen = 0
        self._num_started = 0
        self._version = 0

    def run(self, ticks: int, done: Then) -> None:
        self._go_on()
        self.work_ticks += ticks
        self._num_started += 1
        heappush(self._tasks, (self._clock + ticks, self._num_started, done))
        self._plan()

    def spend(self, names: tuple[OverheadName, ...], then: Then) -> None:
        overheads = [getattr(self._costs, name) for name in names]
        beside = ticks_of(sum(each.beside_s for each in overheads))
        if beside:
            self.run(beside, _nothing)
        at = self._events.now + ticks_of(sum(each.delay_s for each in overheads))
        work = ticks_of(sum(each.work_s for each in overheads))
        self._events.push(at, Rank.END, partial(self.run, work, then))

    def spend_in_turn(self, name: OverheadName, then: Then) -> None:
        self._turns.append((name, then))
        if len(self._turns) == 1:
            self.spend((name,), self._end_turn)

    def _end_turn(self) -> None:
        _, then = self._turns.popleft()
        if self._turns:
            self.spend((self._turns[0][0],), self._end_turn)
        then()

    def send_tokens(self, num_tokens: int) -> None:
        if num_tokens and self._costs.token_s:
            self.run(num_tokens * ticks_of(self._costs.token_s), _nothing)

    def _go_on(self) -> None:
        """Advances the clock to now."""
        elapsed, self._seen = self._events.now - self._seen, self._events.now
        self._clock += min(elapsed, elapsed * self._capacity // (_CORE * max(1, len(self._tasks))))

    def _plan(self) -> None:
        """Plans when the first task will end if no other comes."""
        self._version += 1
        if self._tasks:
            left = max(0, self._tasks[0][0] - self._clock)
            ticks = max(left, ceil_div(left * _CORE * len(self._tasks), self._capacity))
            self._events.push(self._events.now + ticks, Rank.END, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._go_on()
        _, _, done = heappop(self._tasks)
        self._plan()
        done()


def _nothing() -> None:
    """Does nothing, as the action after background work."""
