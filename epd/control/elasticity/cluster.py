"""Defines the data elasticity decides on: metrics of workers and the cluster load made of them. Frozen.

The same metrics come from the live system and from the simulator:

    stage     unit            queued_units                             a round
    encode    patch           given to it, not encoded                 one batch
    prefill   prompt token    that could be computed now               one pass with prompts in it
    decode    output token    0: answer lengths are estimated          one pass with answers in it

A prompt whose media have not been decoded or encoded waits for others, not for its prefill worker.

A pass with prompts and answers is a round of both; its time is split by what each of them adds.

A worker's *work* at a stage is in seconds of one worker, at the measured rate. Requests count wherever they
are: where answers are generated concurrently, a queue cannot be distinguished from a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from epd.topology import Stage

Roles = frozenset[Stage]
_LANGUAGE: Roles = frozenset({"prefill", "decode"})
_LEAST_SHARE = 0.02  # of all work that a stage is given: one without any known work is not without workers


@dataclass(frozen=True, slots=True)
class StageSample:
    """Samples one stage of one worker. queued_units, num_requests: now; the others are totals that only grow.

    num_requests: at this stage; for prefill, those with tokens that could be computed now; for decode, those
        whose prompt is there and whose answer is not complete
    done_units, num_rounds, busy_s: finished units, rounds they took, and seconds spent on them
    """

    num_requests: int = 0
    queued_units: float = 0.0
    done_units: float = 0.0
    num_rounds: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """Samples the metrics of a worker.

    stages: those of its roles, and those it is still finishing
    since_s: when it took its roles, on the clock of `now_s`
    kv_usage: share of its KV cache in use, None without one
    is_switching: its roles must not be changed now, because a switch is under way
    """

    name: str
    roles: Roles
    since_s: float
    stages: Mapping[Stage, StageSample]
    kv_usage: float | None = None
    is_switching: bool = False


@dataclass(frozen=True, slots=True)
class MediaSample:
    """Samples a media worker.

    num_threads: tasks that it does at once
    num_tasks: tasks under way and waiting now
    num_done: tasks done since its start
    """

    name: str
    num_threads: int
    num_tasks: int
    num_done: int


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """Describes a worker as the controller sees it. queued_s: seconds of work that it has, by stage."""

    name: str
    roles: Roles
    since_s: float
    queued_s: Mapping[Stage, float]
    num_running: int
    kv_usage: float | None = None
    is_switching: bool = False

    @property
    def drain_s(self) -> float:
        """Returns the seconds until the worker is idle, if nothing new comes."""
        return self.drain_but_s(frozenset())

    def drain_but_s(self, kept: Collection[Stage]) -> float:
        """Returns the seconds until the worker has no work left but that of the stages that it keeps."""
        return sum(seconds for stage, seconds in self.queued_s.items() if stage not in kept)


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Describes the work that one more request adds to a stage.

    share: of arriving requests that come to the stage at all
    num_parts: of a request; a worker with b requests does one part of each in round_s + part_s * b
    max_batch: concurrent requests on one worker, None without a known limit
    """

    share: float = 0.0
    num_parts: float = 1.0
    round_s: float = 0.0
    part_s: float = 0.0
    max_batch: float | None = None

    @property
    def request_s(self) -> float:
        """Returns one worker's seconds per request, at the largest batch."""
        per_part = self.round_s / self.max_batch if self.max_batch else 0.0
        return self.num_parts * (self.part_s + per_part)


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """Describes one stage of the whole cluster.

    num_workers: that serve it; one with several roles counts by its time here, as `divided` has it
    num_requests: at this stage
    queued_s: their seconds of work of one worker
    utilisation: share of the time that its workers were busy since the last look
    demand: workers that arrivals need, all the time and with the largest batches, at the end of the horizon
    peak: the largest demand in the last minutes
    lasting_peak: the same of demands that lasted, or are too large for noise; older ones fade
    """

    stage: Stage
    need: StageNeed
    num_workers: float
    num_requests: float
    queued_s: float
    utilisation: float
    demand: float
    peak: float
    lasting_peak: float


@dataclass(frozen=True, slots=True)
class ClusterTraffic:
    """Describes all that is known at `now_s`.

    arrival_rate: requests per second
    arrival_trend: its change per second, which is believed for about trend_s
    num_waiting: requests that no worker has taken yet
    stages: in order
    is_known: enough data has arrived to decide on
    """

    now_s: float
    arrival_rate: float
    arrival_trend: float
    trend_s: float
    num_waiting: int
    stages: Mapping[Stage, StageTraffic]
    workers: tuple[WorkerStanding, ...]
    is_known: bool = True

    def arrivals_at(self, ahead_s: float) -> float:
        """Returns the requests per second expected that many seconds ahead."""
        return damped(self.arrival_rate, self.arrival_trend, self.trend_s, ahead_s)

    def capacity(self, roles: Iterable[Roles], ahead_s: float = 30.0) -> dict[Stage, float]:
        """Returns each stage's workers among workers with such roles, by what has come and will come."""
        num_new = self.num_waiting + self.arrival_rate * ahead_s
        needs, num_before = dict[Stage, float](), 0.0  # num_before: at earlier stages
        for stage, each in self.stages.items():
            needs[stage] = (num_before + each.num_requests + num_new * each.need.share) * each.need.request_s
            num_before += each.num_requests
        least = _LEAST_SHARE * sum(needs.values())
        return divided(roles, {stage: max(need, least) for stage, need in needs.items()})


def damped(rate: float, slope: float, memory_s: float, ahead_s: float) -> float:
    """Extrapolates a rate with a trend that is believed less the farther it reaches; at least 0."""
    return max(0.0, rate + slope * memory_s * (1 - math.exp(-ahead_s / memory_s)))


def divided(workers: Iterable[Roles], needs: Mapping[Stage, float]) -> dict[Stage, float]:
    """Divides the time of workers: the stage that gets the least of its need gets as much as it can.

    Returns workers by stage. needs: by stage, in any unit; without any, stages count alike
    """
    kinds, found = _working(workers), dict[Stage, float]()
    while left := [stage for stage in needs if stage not in found]:
        wanted = {stage: needs[stage] for stage in left}
        if not 0 < sum(wanted.values()) < math.inf:
            wanted = dict.fromkeys(left, 1.0)
        group, num = min(_groups(kinds, left), key=lambda each: _ratio(each[1], _sum(wanted, each[0])))
        need = _sum(wanted, group)
        found |= {stage: num * (wanted[stage] / need) if len(group) > 1 else num for stage in group}
        kinds = Counter({roles: count for roles, count in kinds.items() if roles.isdisjoint(group)})
    return found


def most_needed(workers: Iterable[Roles], needs: Mapping[Stage, float]) -> float:
    """Returns the largest share of their time that stages, or several together, need of their workers.

    needs: workers by stage
    """
    groups = _groups(_working(workers), list(needs))
    return max((_ratio(need, num) for group, num in groups if (need := _sum(needs, group))), default=0.0)


def _working(workers: Iterable[Roles]) -> Counter[Roles]:
    """Counts workers by roles, without those that others leave idle.

    A worker that prefills and decodes completes what it begins: it serves no other one's prompts or answers.
    """
    kinds = list(workers)
    languages = {roles & _LANGUAGE for roles in kinds} - {frozenset()}
    if _LANGUAGE not in languages or len(languages) != 2:
        return Counter(kinds)
    (idle,) = languages - {_LANGUAGE}
    return Counter(roles if roles >= _LANGUAGE else roles - idle for roles in kinds)


def _groups(
    kinds: Mapping[Roles, int], stages: Collection[Stage]
) -> Iterator[tuple[Collection[Stage], float]]:
    """Yields stages, alone and where workers are merged together, with the workers that serve any of them."""
    largest = max(map(len, kinds), default=1)
    for size in range(1, len(stages) + 1 if largest > 1 else 2):
        for group in combinations(stages, size):
            yield group, float(sum(num for roles, num in kinds.items() if not roles.isdisjoint(group)))


def _sum(needs: Mapping[Stage, float], stages: Collection[Stage]) -> float:
    return sum(needs[stage] for stage in stages)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf
