"""Advises how many replicas of stage workers and of media workers a load needs. Time is passed in.

    need    workers that arrivals take, and that work off what waits within clear_s
    up      more are needed in every look of up_delay_s: to the least that all of those looks needed
    down    fewer are enough in every look of down_delay_s: to the most that any of those looks needed

Fewer are enough only if the peak of the last minutes would leave them spare time, and if the answers under
way fit them. A count that had to grow soon after it shrank waits twice as long before it shrinks again, so
that no wave of load makes replicas come and go for ever. Roles within the count are the RoleController's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from epd.control.elasticity.assignment import layout_for
from epd.control.elasticity.cluster import ClusterTraffic, MediaSample, StageTraffic
from epd.control.elasticity.forecast import USABLE
from epd.control.recent import DecayedMean
from epd.topology import STAGES, Stage, Topology

AdviceVerdict = Literal["unknown load", "enough", "up", "up soon", "down", "down soon", "at the limit"]
# Share of the usable time that fewer replicas may need before one is given up.
_SLACK = 0.8
_MAX_DOUBLINGS = 4
_MEDIA_MEMORY_S = 20.0


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Configures when a number of replicas changes.

    min_replicas, max_replicas: bounds of the number
    up_delay_s: time for which more must have been needed
    down_delay_s: time for which fewer must have been enough; doubles with each mistake in memory_s
    memory_s: time for which a replica that was given up too soon is remembered
    clear_s: time in which waiting work should be gone; below a replica's start-up time, counts overshoot
    """

    min_replicas: int = 1
    max_replicas: int = 1
    up_delay_s: float = 5.0
    down_delay_s: float = 60.0
    memory_s: float = 1800.0
    clear_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"replicas must be at least 1 and at most max_replicas, got {self}")
        if min(self.up_delay_s, self.down_delay_s) < 0 or min(self.memory_s, self.clear_s) <= 0:
            raise ValueError(f"delays must be at least 0 s, memory and clear_s above 0 s, got {self}")

    def bounded(self, num: int) -> int:
        return min(max(num, self.min_replicas), self.max_replicas)


@dataclass(frozen=True, slots=True)
class ReplicaAdvice:
    """Records how many replicas there should be. reason: a line for people."""

    at_s: float
    verdict: AdviceVerdict
    num_replicas: int
    reason: str


class StageReplicas:
    """Advises the number of stage workers. Call `advise` every second or two with the load of the fleet."""

    def __init__(self, config: ReplicaConfig, wanted: Topology) -> None:
        """Starts with the number of workers at the first look. wanted: its sets of roles are used."""
        self.config = config
        self._wanted = wanted
        self._count = _SteadyCount(config)

    def advise(self, traffic: ClusterTraffic) -> ReplicaAdvice:
        """Returns how many stage workers there should be. load: of the whole fleet."""
        current = self._count.start(len(traffic.workers))
        if not traffic.is_known:
            return ReplicaAdvice(
                traffic.now_s, "unknown load", current, "too little has been seen of the load"
            )
        now, peak = _needs(traffic, self.config.clear_s, 0.0), _needs(traffic, self.config.clear_s, _SLACK)
        bound = self.config.max_replicas + 1  # one more, to say that they are not enough
        least, most = (layout_for(each, self._wanted, bound).total() for each in (now, peak))
        needs = ", ".join(f"{stage} {now[stage]:.1f}" for stage in STAGES)
        why = f"at most {USABLE:.0%} busy, the stages need {needs} workers"
        return self._count.follow(traffic.now_s, least, most, why)


class MediaReplicas:
    """Advises the number of media workers. Call `advise` every second or two with a sample of each."""

    def __init__(self, config: ReplicaConfig) -> None:
        """Starts with the number of workers at the first look."""
        self.config = config
        self._count = _SteadyCount(config)
        self._busy = DecayedMean(_MEDIA_MEMORY_S)
        self._done = DecayedMean(_MEDIA_MEMORY_S)
        self._last: dict[str, int] = {}
        self._looked_s: float | None = None

    def advise(self, now_s: float, workers: Sequence[MediaSample]) -> ReplicaAdvice:
        """Returns how many media workers there should be. workers: all that are alive."""
        current = self._count.start(len(workers))
        elapsed_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._note(now_s, elapsed_s, workers)
        num_threads = sum(each.num_threads for each in workers)
        if not num_threads or not elapsed_s:
            return ReplicaAdvice(
                now_s, "unknown load", current, "no media worker has been seen for long enough"
            )
        needed = self._needed_threads(workers) / (num_threads / len(workers)) / USABLE
        why = f"at most {USABLE:.0%} busy, media need {needed:.1f} workers"
        least, most = max(1, math.ceil(needed)), max(1, math.ceil(needed / _SLACK))
        return self._count.follow(now_s, least, most, why)

    def _note(self, now_s: float, elapsed_s: float, workers: Sequence[MediaSample]) -> None:
        """Records threads at work and tasks done since the last look; a restarted worker begins from none."""
        num_done = 0
        for each in workers:
            before = self._last.get(each.name, each.num_done)
            num_done += each.num_done - (before if before <= each.num_done else 0)
        num_busy = sum(min(each.num_tasks, each.num_threads) for each in workers)
        self._busy.add(num_busy * elapsed_s, elapsed_s, elapsed_s)
        self._done.add(num_done, elapsed_s, elapsed_s)
        self._last = {each.name: each.num_done for each in workers}
        self._looked_s = now_s

    def _needed_threads(self, workers: Sequence[MediaSample]) -> float:
        """Returns the threads at work on average, and those that would work off the tasks that wait.

        A task takes the threads at work by the tasks that end in a second (Little's law).
        """
        busy, done_per_s = self._busy.value or 0.0, self._done.value or 0.0
        num_waiting = sum(max(0, each.num_tasks - each.num_threads) for each in workers)
        task_s = busy / done_per_s if done_per_s else self.config.clear_s
        return busy + num_waiting * task_s / self.config.clear_s


@dataclass(slots=True)
class _Streak:
    """Counts looks in a row that want a change of the same direction. num: the smallest change of them."""

    is_up: bool
    since_s: float
    num: int


class _SteadyCount:
    """Follows a needed number with delays."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        self._num: int | None = None
        self._streak: _Streak | None = None
        self._shrank_s = float("-inf")
        self._mistakes: deque[float] = deque(maxlen=_MAX_DOUBLINGS)

    def start(self, num_present: int) -> int:
        """Returns the present number: at first that of the workers that are there, within the bounds."""
        if self._num is None:
            self._num = self._config.bounded(num_present)
        return self._num

    def follow(self, now_s: float, least: int, most: int, why: str) -> ReplicaAdvice:
        """Returns the number for now. least: needed now. most: enough for the peak, with time to spare."""
        num = self.start(least)
        wanted = self._config.bounded(least if least > num else min(num, max(least, most)))
        if wanted == num:
            self._streak = None
            is_short = least > num
            bounds = f"at the limit of {self._config.max_replicas}, {least} are needed"
            return self._advice(
                now_s, "at the limit" if is_short else "enough", bounds if is_short else "", why
            )
        streak, left_s = self._continued(now_s, wanted, is_up=wanted > num)
        way = "up" if streak.is_up else "down"
        if left_s > 0:
            text = f"{way} to {streak.num} in {left_s:.0f} s if it stays so"
            return self._advice(now_s, "up soon" if streak.is_up else "down soon", text, why)
        self._change(now_s, streak)
        return self._advice(now_s, "up" if streak.is_up else "down", f"{way} from {num}", why)

    def _continued(self, now_s: float, wanted: int, *, is_up: bool) -> tuple[_Streak, float]:
        """Returns the streak with this look, and the seconds for which it must go on."""
        streak = self._streak
        if streak is None or streak.is_up != is_up:
            streak = _Streak(is_up, now_s, wanted)
        streak.num = min(streak.num, wanted) if is_up else max(streak.num, wanted)
        self._streak = streak
        delay_s = self._config.up_delay_s if is_up else self._down_delay_s(now_s)
        return streak, streak.since_s + delay_s - now_s

    def _down_delay_s(self, now_s: float) -> float:
        num = sum(at_s > now_s - self._config.memory_s for at_s in self._mistakes)
        return self._config.down_delay_s * 2.0**num

    def _change(self, now_s: float, streak: _Streak) -> None:
        if streak.is_up and now_s - self._shrank_s < self._config.memory_s:
            self._mistakes.append(now_s)
            self._shrank_s = float("-inf")
        elif not streak.is_up:
            self._shrank_s = now_s
        self._num, self._streak = streak.num, None

    def _advice(self, now_s: float, verdict: AdviceVerdict, change: str, why: str) -> ReplicaAdvice:
        num = self._num or 0
        bounds = f"{num} of {self._config.min_replicas} to {self._config.max_replicas} replicas"
        return ReplicaAdvice(now_s, verdict, num, f"{bounds}{', ' if change else ''}{change}: {why}")


def _needs(traffic: ClusterTraffic, clear_s: float, slack: float) -> dict[Stage, float]:
    """Returns the workers that each stage needs, the part of their time that must stay free included.

    slack: 0 for what is needed now; else the share of the usable time that the peak may take
    """
    return {stage: _need(traffic, each, clear_s, slack) / USABLE for stage, each in traffic.stages.items()}


def _need(traffic: ClusterTraffic, stage: StageTraffic, clear_s: float, slack: float) -> float:
    at_work = stage.demand + _backlog_s(traffic, stage) / clear_s
    if slack:
        at_work = max(at_work, stage.peak) / slack
    return max(at_work, _held(traffic)) if stage.stage == "decode" else at_work


def _backlog_s(traffic: ClusterTraffic, stage: StageTraffic) -> float:
    """Returns the work that waits at a stage, or before all workers, in seconds of one worker."""
    one_s = stage.need.request_s
    unplaced_s = traffic.num_waiting * stage.need.share * one_s
    if stage.stage != "decode":
        return unplaced_s + max(0.0, stage.queued_s - stage.num_workers * one_s)
    batch = stage.need.max_batch
    num_beyond = 0.0 if batch is None else max(0.0, stage.num_requests - stage.num_workers * batch)
    return unplaced_s + num_beyond * one_s


def _held(traffic: ClusterTraffic) -> float:
    """Returns the decode workers whose memory the answers under way fill."""
    return sum(each.kv_usage or 0.0 for each in traffic.workers if "decode" in each.roles)
