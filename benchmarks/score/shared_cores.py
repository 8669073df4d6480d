"""Models an application and its workers on one machine whose processes share all cores, in the simulator.

    client, proxy, ingress  --messages-->  workers       each one a process; few cores for all

    n tasks on c cores: each runs at min(1, c / n) of its speed

It is measured with requests sent one after the other, so that none waits for another: time not spent in
the model is the application's. Wall time shows the length of the critical path, CPU time how much of it is
computed and how much is computed beside it.

With equal speeds for all, one clock is enough: it runs as fast as any task, and a task ends when the
clock has advanced by its length.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from epd.profiles.cost import StageTable
from epd.profiles.profile import Profile
from epd.simulate import Deployment, Simulation
from epd.simulate.clock import EventPriority, EventQueue, Machine, OverheadName, SimulatedTask, Then, ticks_of
from epd.types import ceil_div

_CORE = 1000  # shares of one core
# Fields of `HostCosts`: actions on the way of a request.
WAYS = ("request", "split", "media", "image", "video", "sent", "second", "end")


@dataclass(frozen=True, slots=True)
class Overhead:
    """Holds the cost of one action of the application, seconds.

    work_s: of one core, on the critical path of the request
    delay_s: on the critical path too, but without computing
    beside_s: of one core, off the critical path
    """

    work_s: float = 0.0
    delay_s: float = 0.0
    beside_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.work_s, self.delay_s, self.beside_s) < 0:
            raise ValueError(f"an overhead takes at least 0 s, got {self}")


_NOTHING = Overhead()


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Holds the costs of the application.

    num_cores: shared by all workers and the application
    idle_cores: cores in use without any request
    request: from the client to a worker and back
    split: extra where another worker decodes
    media: extra of a request with any, before it is read
    image: of one, or of a clip of sound, before its prompt is planned and again to hand it over
    video: of one group of frames, to hand it over
    sent: extra where another worker prefills than encodes
    second: from the first token to the second, where another worker decodes
    end: from the last token of an answer to its end
    token_s: of one output token, off the critical path
    encode_s, prefill_s, decode_s, sequence_s: of a batch, a pass, a step and each sequence in the step, in
        the worker, beside the time of the model
    """

    num_cores: int
    idle_cores: float
    request: Overhead = _NOTHING
    split: Overhead = _NOTHING
    media: Overhead = _NOTHING
    image: Overhead = _NOTHING
    video: Overhead = _NOTHING
    sent: Overhead = _NOTHING
    second: Overhead = _NOTHING
    end: Overhead = _NOTHING
    token_s: float = 0.0
    encode_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    sequence_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_cores < 1 or not 0 <= self.idle_cores < self.num_cores:
            raise ValueError(f"a host needs at least 1 core, and not all of them idle, got {self}")

    def in_worker(
        self, encode: StageTable, prefill: StageTable, decode: StageTable
    ) -> tuple[StageTable, ...]:
        """Returns the stages as a worker of the application has them."""
        return (
            _slower(encode, self.encode_s),
            _slower(prefill, self.prefill_s),
            _slower(decode, self.decode_s, self.sequence_s),
        )


def _slower(table: StageTable, fixed_s: float, per_unit_s: float = 0.0) -> StageTable:
    cost = table.cost
    return replace(
        table,
        cost=replace(cost, fixed_s=cost.fixed_s + fixed_s, per_unit_s=cost.per_unit_s + per_unit_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedProfile(Profile):
    """Describes a model whose workers share one machine with the application. host: its costs."""

    host: HostCosts

    @classmethod
    def of(cls, profile: Profile, host: HostCosts, **changes: Any) -> HostedProfile:
        """Returns the profile of stages measured alone, with the application's costs, and with changes."""
        return cls(
            **{each.name: getattr(profile, each.name) for each in fields(Profile)} | changes, host=host
        )

    def simulation(self, deployment: Deployment, *, has_spans: bool = False) -> Simulation:
        """Returns a simulation on shared cores: steps share them with others, so none has a known length."""
        encode, prefill, decode = self.host.in_worker(self.encode, self.prefill, self.decode)
        drafts = deployment.drafts
        if drafts is not None and (per_unit_s := decode.cost.per_unit_s):
            # The application's worker does nothing for a drafted token.
            drafts = replace(drafts, units=max(0.0, 1 - self.host.sequence_s / per_unit_s))
        return Simulation(
            replace(self, encode=encode, prefill=prefill, decode=decode),
            replace(deployment, is_stepwise=True, drafts=drafts),
            has_spans=has_spans,
            machine=partial(SharedCores, costs=self.host),
        )


_FILE = TypeAdapter(HostedProfile)


def write_profile(profile: HostedProfile, path: Path) -> None:
    """Writes a profile with its host as JSON."""
    path.write_bytes(_FILE.dump_json(profile, indent=1))


def read_profile(path: Path) -> HostedProfile:
    """Reads what `write_profile` wrote."""
    return _FILE.validate_json(path.read_bytes())


class SharedCores(Machine):
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
