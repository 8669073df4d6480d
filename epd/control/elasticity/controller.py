"""Decides which worker takes which roles from the load of a cluster. Time is passed in.

    gain    time that requests would save over the horizon if the worker had its new roles at once
    cost    time that the drain, the load of weights and lost caches take from that gain
    switch  when the gain exceeds the cost by a margin, in several looks in a row

No switch may leave a stage with less than it needs, or needed in the last minutes, unless another stage has
even less: a bottleneck is not replaced by a worse one, nor a short wave of load taken for a lasting change.

A stage that gave workers away and now wants them back, or the other way round, has turned. Each turn doubles
the margin and the time between turns, so that no load, however it swings, makes roles oscillate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from epd.control.elasticity.cluster import ClusterTraffic, Roles, WorkerStanding, most_needed
from epd.control.elasticity.forecast import USABLE, Forecast, Phase, look_ahead
from epd.topology import Stage, closed_roles, role_letters, stages_of

# Why nothing was switched, or "switch".
Verdict = Literal[
    "switch",
    "unknown load",
    "in flight",
    "cooldown",
    "no candidate",
    "no gain",
    "below margin",
    "turning",
    "unconfirmed",
]
PURE_ROLES: tuple[Roles, ...] = (frozenset({"encode"}), frozenset({"prefill"}), frozenset({"decode"}))
_MAX_DECISIONS = 64
_MAX_BACKOFFS = 6


@dataclass(frozen=True, slots=True)
class Switch:
    """Names a worker and the roles it should take."""

    worker: str
    roles: Roles


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """Configures when roles switch.

    roles: sets of roles between which workers may change; a worker with others keeps them
    interval_s: time between two looks
    horizon_s: period over which gain and cost are weighed
    load_s: from the end of a drain to the new role, until a switch to it has shown how long it takes
    max_drain_s: time after which the work of a draining worker is moved or dropped
    cache_s: work to repeat because a cache of encode or prefill is lost
    margin: share of the cost by which the gain must exceed it; 0.5 is half of it
    min_gain: net gain required, as a share of the time that all requests would spend
    min_waiting: requests beyond one per worker that the helped stage has or is predicted to have
    num_confirm: looks in a row that must agree
    cooldown_s, turn_cooldown_s: minimum time after a switch, and after one with which a stage turned
    turn_s: minimum time before the first turn; it and the margin double with each turn in memory_s
    min_encode, min_prefill, min_decode: minimum workers that serve each stage
    max_in_flight: concurrent switches
    backoff_s: time without switches of a worker after one failed; doubles with each failure
    """

    roles: tuple[Roles, ...] = PURE_ROLES
    interval_s: float = 1.0
    horizon_s: float = 30.0
    load_s: float = 0.7
    max_drain_s: float = 2.0
    cache_s: float = 0.5
    margin: float = 0.5
    min_gain: float = 0.03
    min_waiting: float = 2.0
    num_confirm: int = 2
    cooldown_s: float = 2.0
    turn_cooldown_s: float = 16.0
    turn_s: float = 10.0
    memory_s: float = 300.0
    min_encode: int = 1
    min_prefill: int = 1
    min_decode: int = 1
    max_in_flight: int = 1
    backoff_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.interval_s, self.horizon_s, self.memory_s, self.turn_s, self.backoff_s) <= 0:
            raise ValueError(f"interval, horizon, memory, turn and backoff must be above 0 s, got {self}")
        spans_s = self.load_s, self.max_drain_s, self.cache_s, self.cooldown_s, self.turn_cooldown_s
        if min(*spans_s, self.margin) < 0:
            raise ValueError(f"no time and no margin may be below 0, got {self}")
        if min(self.min_encode, self.min_prefill, self.min_decode, self.max_in_flight, self.num_confirm) < 1:
            raise ValueError(f"every stage needs a worker, and every count is at least 1, got {self}")
        if not 0 <= self.min_gain < 1 or self.min_waiting <= 1:
            raise ValueError(f"min_gain lies in [0, 1) and min_waiting above 1, got {self}")

    def min_workers(self, stage: Stage) -> int:
        least = {"encode": self.min_encode, "prefill": self.min_prefill, "decode": self.min_decode}
        return least.get(stage, 0)


@dataclass(frozen=True, slots=True)
class Decision:
    """Records a decision and its reason.

    switch, old_roles: the best option, started if the verdict is "switch"
    gain_s, cost_s: seconds that all requests together spend over the horizon
    reason: a line for people
    """

    at_s: float
    verdict: Verdict
    reason: str
    switch: Switch | None = None
    old_roles: Roles = frozenset()
    gain_s: float = 0.0
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Option:
    """Holds a switch and its weights. spent_s: time that requests would spend without it."""

    switch: Switch
    old_roles: Roles
    gain_s: float
    cost_s: float
    spent_s: float

    @property
    def net_s(self) -> float:
        return self.gain_s - self.cost_s

    def __str__(self) -> str:
        return f"{self.switch.worker}: {role_letters(self.old_roles)} to {role_letters(self.switch.roles)}"

    def decision(self, now_s: float, verdict: Verdict, why: str) -> Decision:
        reason = f"{self}, gains {self.gain_s:.1f} s for {self.cost_s:.1f} s: {why}"
        return Decision(now_s, verdict, reason, self.switch, self.old_roles, self.gain_s, self.cost_s)


@dataclass(frozen=True, slots=True)
class _Change:
    at_s: float
    worker: str
    gained: frozenset[Stage]
    lost: frozenset[Stage]


class SwitchHistory:
    """Keeps switches of the last memory_s and counts a stage's turns: from gaining workers to losing them."""

    def __init__(self, memory_s: float) -> None:
        self.memory_s = memory_s
        self._changes: list[_Change] = []

    def add(self, now_s: float, worker: str, old: Roles, new: Roles) -> None:
        self._changes = [each for each in self._changes if each.at_s > now_s - self.memory_s]
        self._changes.append(_Change(now_s, worker, new - old, old - new))

    def withdraw(self, worker: str) -> None:
        """Removes the last switch of the worker, which did not take place."""
        for index in range(len(self._changes) - 1, -1, -1):
            if self._changes[index].worker == worker:
                del self._changes[index]
                return

    def turns(self, now_s: float, old: Roles, new: Roles) -> tuple[int, float]:
        """Returns the turns of a stage with this switch, and the seconds since it last changed the other way.

        The stage with the most turns counts; (0, infinity) if no stage turns.
        """
        found = (0, float("inf"))
        for stage in old ^ new:
            count, other_s = self._turns(now_s, stage, gains=stage in new)
            if count > found[0]:
                found = (count, now_s - other_s)
        return found

    def _turns(self, now_s: float, stage: Stage, *, gains: bool) -> tuple[int, float]:
        count, last, other_s = 0, None, float("-inf")
        for each in self._changes:
            if each.at_s <= now_s - self.memory_s or stage not in each.gained | each.lost:
                continue
            is_gain = stage in each.gained
            count += last is not None and is_gain != last
            last = is_gain
            if is_gain != gains:
                other_s = each.at_s
        count += last is not None and last != gains
        return count, other_s


class _Weighing:
    """Weighs switches at one look. now: roles by worker. load_s: seconds by the stages that are started."""

    def __init__(
        self,
        config: ControllerConfig,
        traffic: ClusterTraffic,
        now: Mapping[str, Roles],
        load_s: Mapping[Roles, float],
    ) -> None:
        self._config, self._traffic, self._now, self._load_s = config, traffic, now, load_s
        self._capacity_now = self._capacity(now.values())
        self._base = self._ahead([Phase(config.horizon_s, self._capacity_now)])

    def may_help(self, worker: WorkerStanding, roles: Roles) -> bool:
        """Returns whether a stage where requests wait gets more of the workers' time, and all bear it."""
        after = {**self._now, worker.name: roles}
        capacity, before = self._capacity(after.values()), self._capacity_now
        waiting = (num for each, num in self._base.most_waiting.items() if capacity[each] > before[each])
        return max(waiting, default=0.0) >= self._config.min_waiting and _is_bearable(
            self._traffic, self._now.values(), after.values()
        )

    def option(self, worker: WorkerStanding, roles: Roles) -> _Option:
        """Weighs the gain and cost of giving a worker other roles, as the module docstring defines them."""
        others = [each for name, each in self._now.items() if name != worker.name]
        kept = worker.roles - closed_roles(worker.roles, roles)
        drain_s = min(worker.drain_but_s(kept), self._config.max_drain_s)
        after = Phase(self._config.horizon_s, self._capacity([*others, roles]))
        phases = [
            Phase(drain_s, self._capacity_now),
            Phase(drain_s + self._loading_s(worker.roles, roles), self._capacity(others)),
            after,
        ]
        at_once_s = self._ahead([after]).spent_s
        cost_s = self._ahead(phases, worker.roles - roles).spent_s - at_once_s
        base_s = self._base.spent_s
        return _Option(Switch(worker.name, roles), worker.roles, base_s - at_once_s, cost_s, base_s)

    def _loading_s(self, before: Roles, after: Roles) -> float:
        """Returns how long the stages that a switch starts take; nothing where all of them run already."""
        started = _started(before, after)
        return self._load_s.get(started, self._config.load_s) if started else 0.0

    def _capacity(self, roles: Iterable[Roles]) -> Mapping[Stage, float]:
        return self._traffic.capacity(roles, self._config.horizon_s)

    def _ahead(self, phases: Sequence[Phase], lost: Roles = frozenset()) -> Forecast:
        lost_s = dict.fromkeys(lost, self._config.cache_s)
        return look_ahead(self._traffic, phases, self._config.horizon_s, lost_s)


class RoleController:
    """Decides on switches every config.interval_s. A switch is in flight until its end is reported."""

    def __init__(
        self, config: ControllerConfig | None = None, keeps_roles: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Starts without a decision. keeps_roles: whether a worker, by its name, is never switched"""
        self.config = config or ControllerConfig()
        self._keeps_roles = keeps_roles
        self._history = SwitchHistory(self.config.memory_s)
        self._in_flight: dict[str, tuple[Roles, Roles]] = {}  # before and after
        self._load_s: dict[Roles, float] = {}  # that the last switch which started these stages took
        self._num_failed: dict[str, int] = {}
        self._left_alone_s: dict[str, float] = {}  # workers without switches until then
        self._quiet_until_s = float("-inf")
        self._streak: tuple[Roles, Roles, int] | None = None
        self._decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)

    def decide(self, now_s: float, traffic: ClusterTraffic) -> Switch | None:
        """Returns the switch to start now, if any."""
        names = {worker.name for worker in traffic.workers}
        for name in [name for name in self._in_flight if name not in names]:
            self.failed(now_s, name)
        decision = self._decide(now_s, traffic)
        if self._decisions and self._decisions[-1].verdict == decision.verdict != "switch":
            self._decisions.pop()
        self._decisions.append(decision)
        if decision.verdict != "switch" or decision.switch is None:
            return None
        self._streak = None
        turns, _ = self._history.turns(now_s, decision.old_roles, decision.switch.roles)
        self._quiet_until_s = now_s + (self.config.turn_cooldown_s if turns else self.config.cooldown_s)
        self._in_flight[decision.switch.worker] = decision.old_roles, decision.switch.roles
        self._history.add(now_s, decision.switch.worker, decision.old_roles, decision.switch.roles)
        return decision.switch

    def succeeded(self, now_s: float, worker: str, load_s: float | None = None) -> None:
        """The worker has its new roles. Unknown workers are ignored.

        load_s: that it took from the end of the drain, by which later switches are weighed; None: unknown
        """
        change = self._in_flight.pop(worker, None)
        if change is not None:
            if load_s is not None:
                self._load_s[_started(*change)] = load_s
            self._num_failed.pop(worker, None)
            self._quiet_until_s = max(self._quiet_until_s, now_s + self.config.cooldown_s)

    def failed(self, now_s: float, worker: str) -> None:
        """The worker kept its old roles or is gone: it is left alone for a while, longer each time."""
        if self._in_flight.pop(worker, None) is None:
            return
        self._history.withdraw(worker)
        count = self._num_failed[worker] = self._num_failed.get(worker, 0) + 1
        backoff_s = self.config.backoff_s * 2 ** min(count - 1, _MAX_BACKOFFS)
        self._left_alone_s[worker] = now_s + backoff_s
        self._quiet_until_s = max(self._quiet_until_s, now_s + self.config.cooldown_s)

    @property
    def decisions(self) -> Sequence[Decision]:
        """Returns the last decisions, oldest first; of a run with one verdict but "switch", the latest."""
        return tuple(self._decisions)

    @property
    def in_flight(self) -> frozenset[str]:
        """Returns the workers whose switch has not ended."""
        return frozenset(self._in_flight)

    # Weighing

    def _decide(self, now_s: float, traffic: ClusterTraffic) -> Decision:
        if not traffic.is_known:
            return Decision(now_s, "unknown load", "too little has been seen of the load")
        if len(self._in_flight) >= self.config.max_in_flight:
            return Decision(now_s, "in flight", f"{', '.join(sorted(self._in_flight))} is switching")
        if now_s < self._quiet_until_s:
            left_s = self._quiet_until_s - now_s
            return Decision(now_s, "cooldown", f"{left_s:.1f} s are left since the last switch")
        candidates = list(self._candidates(now_s, traffic))
        if not candidates:
            return Decision(now_s, "no candidate", "no worker may leave its roles")
        option = self._best(traffic, candidates)
        if option is None:
            self._streak = None
            return Decision(now_s, "no gain", "no stage has requests that wait which a worker could help")
        return self._judge(now_s, option)

    def _candidates(self, now_s: float, traffic: ClusterTraffic) -> Iterator[tuple[WorkerStanding, Roles]]:
        """Yields, for each change of roles, the worker that is ready for it soonest, if one can be spared.

        None only gives up roles: a worker's time goes to those of its stages that have work.
        """
        for before, after in permutations(self.config.roles, 2):
            workers = [each for each in traffic.workers if each.roles == before]
            spare = [each for each in workers if self._may_leave(now_s, each)]
            if spare and not after < before and self._can_spare(traffic, before, after):
                kept = before - closed_roles(before, after)
                yield min(spare, key=lambda each: (each.drain_but_s(kept), each.since_s, each.name)), after

    def _may_leave(self, now_s: float, worker: WorkerStanding) -> bool:
        is_busy = worker.is_switching or worker.name in self._in_flight or self._keeps_roles(worker.name)
        return not is_busy and now_s >= self._left_alone_s.get(worker.name, float("-inf"))

    def _can_spare(self, traffic: ClusterTraffic, before: Roles, after: Roles) -> bool:
        """Returns whether enough workers stay for what is given up; those that are switching do not count."""
        staying = [
            each.roles
            for each in traffic.workers
            if not each.is_switching and each.name not in self._in_flight
        ]
        least = self.config.min_workers
        closed = closed_roles(before, after)
        return all(sum(stage in each for each in staying) > least(stage) for stage in closed)

    def _best(
        self, traffic: ClusterTraffic, candidates: Sequence[tuple[WorkerStanding, Roles]]
    ) -> _Option | None:
        """Returns the option with the largest net gain among those that help a stage where requests wait."""
        weighing = _Weighing(self.config, traffic, self._roles_after(traffic), self._load_s)
        options = [weighing.option(*each) for each in candidates if weighing.may_help(*each)]
        helpful = [option for option in options if option.gain_s > 0]
        return max(helpful, key=lambda option: option.net_s, default=None)

    def _roles_after(self, traffic: ClusterTraffic) -> dict[str, Roles]:
        coming = {name: after for name, (_, after) in self._in_flight.items()}
        return {each.name: coming.get(each.name, each.roles) for each in traffic.workers}

    def _judge(self, now_s: float, option: _Option) -> Decision:
        """Returns whether the best option is good enough, and has been for long enough."""
        config, switch = self.config, option.switch
        turns, since_s = self._history.turns(now_s, option.old_roles, switch.roles)
        factor = (1 + config.margin) * 2**turns
        if option.gain_s < factor * option.cost_s or option.net_s < config.min_gain * option.spent_s:
            self._streak = None
            return option.decision(now_s, "below margin", f"wanted are {factor:g} times the cost")
        if turns and since_s < config.turn_s * 2 ** (turns - 1):
            wait_s = config.turn_s * 2 ** (turns - 1) - since_s
            return option.decision(now_s, "turning", f"turn {turns} of a stage, not for {wait_s:.0f} s")
        if self._confirm(option) < config.num_confirm:
            return option.decision(now_s, "unconfirmed", "one look is not enough")
        return option.decision(now_s, "switch", f"more than {factor:g} times the cost")

    def _confirm(self, option: _Option) -> int:
        """Returns how many looks in a row have wanted the option."""
        key = (option.old_roles, option.switch.roles)
        count = self._streak[2] if self._streak is not None and self._streak[:2] == key else 0
        self._streak = (*key, count + 1)
        return count + 1


def _started(before: Roles, after: Roles) -> Roles:
    """Returns the stages that a worker must start."""
    return stages_of(after) - stages_of(before)


def _is_bearable(traffic: ClusterTraffic, now: Iterable[Roles], after: Collection[Roles]) -> bool:
    """Returns whether no stage would become a worse bottleneck than the present one, if any.

    What a stage needs now must fit the usable part of its time, what it needed in the last minutes all
    of it.
    """
    peaks = {stage: max(each.demand, each.lasting_peak) for stage, each in traffic.stages.items()}
    demands = {stage: each.demand for stage, each in traffic.stages.items()}
    worst = most_needed(now, peaks)
    return most_needed(after, demands) <= max(worst, USABLE) and most_needed(after, peaks) <= max(worst, 1.0)
