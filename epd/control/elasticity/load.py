"""What elasticity is decided on: metrics of workers, and the load of a cluster made of them. Frozen.

The same metrics come from the live system and from the simulator:

    stage     unit            queued_units                             a round
    encode    patch           given to it, not encoded                 one batch
    prefill   prompt token    that could be computed now               one pass with prompts in it
    decode    output token    0: how long answers get is estimated     one pass with answers in it

A prompt whose media have not been decoded or encoded waits for others, not for its prefill worker.

A pass with prompts and answers is a round of both; its time is split by what each of them adds.

A worker's *work* at a stage is in seconds of one worker, at the rate that was measured. Requests count
wherever they are: where answers are generated side by side a queue cannot be told from a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from epd.topology import Stage

Roles = frozenset[Stage]


@dataclass(frozen=True, slots=True)
class RequestWork:
    """What one request will take of each stage, as planned on its arrival.

    max_tokens: of its answers, at most. expected_tokens: of its answers while nobody knows how long they get;
    None: max_tokens.
    """

    num_patches: int
    num_prompt_tokens: int
    max_tokens: int
    expected_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_patches < 0 or self.num_prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(f"a request has a prompt and an answer of at least 1 token, got {self}")


@dataclass(frozen=True, slots=True)
class StageSample:
    """One stage of one worker. queued_units, num_requests: now. The others are totals that only grow.

    num_requests: at this stage; for prefill, those with tokens that could be computed now; for decode, those
    whose prompt is there and whose answer is not complete.
    done_units, num_rounds, busy_s: units done, rounds that it took, and seconds spent on them.
    """

    num_requests: int = 0
    queued_units: float = 0.0
    done_units: float = 0.0
    num_rounds: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A worker's metrics. stages: of its roles, and of those it is still bringing to their end.

    since_s: when it took its roles, on the clock of `now_s`. kv_usage: share of its KV cache in use, None
    without one. is_switching: no roles are to be changed now, whoever changes them.
    """

    name: str
    roles: Roles
    since_s: float
    stages: Mapping[Stage, StageSample]
    kv_usage: float | None = None
    is_switching: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """A worker as the controller sees it. queued_s: seconds of work that it has, by stage."""

    name: str
    roles: Roles
    since_s: float
    queued_s: Mapping[Stage, float]
    num_running: int
    kv_usage: float | None = None
    is_switching: bool = False

    @property
    def drain_s(self) -> float:
        """Until it has nothing left, if nothing new comes."""
        return sum(self.queued_s.values())


@dataclass(frozen=True, slots=True)
class StageNeed:
    """What one more request takes of a stage.

    share: of arriving requests, that come to the stage at all. num_parts: of a request; a worker with b
    requests does one part of each in round_s + part_s * b. max_batch: requests at once on one worker, None
    where no limit is known.
    """

    share: float = 0.0
    num_parts: float = 1.0
    round_s: float = 0.0
    part_s: float = 0.0
    max_batch: float | None = None

    @property
    def request_s(self) -> float:
        """Seconds of one worker for one request, with as many others at once as there may be."""
        per_part = self.round_s / self.max_batch if self.max_batch else 0.0
        return self.num_parts * (self.part_s + per_part)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage of the whole cluster.

    num_workers: that serve it; a worker of several roles counts by the share of its time that it needs here.
    num_requests: at this stage. queued_s: seconds of work of one worker that they are. utilisation: share of
    the time that its workers were busy since the last look. demand: workers that arrivals need, all the time
    and with the largest batches, at the end of the horizon; peak: the most they needed in the last minutes.
    """

    stage: Stage
    need: StageNeed
    num_workers: float
    num_requests: float
    queued_s: float
    utilisation: float
    demand: float
    peak: float

    @property
    def predicted(self) -> float:
        """Utilisation at the end of the horizon; above 1 a queue grows."""
        return self.demand / self.num_workers if self.num_workers else math.inf if self.demand else 0.0


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """All that is known at `now_s`.

    arrival_rate: requests per second. arrival_trend: its change per second, which is believed for about
    trend_s. num_waiting: requests that no worker has taken yet. is_known: enough was seen to decide on.
    """

    now_s: float
    arrival_rate: float
    arrival_trend: float
    trend_s: float
    num_waiting: int
    stages: Mapping[Stage, StageLoad]
    workers: tuple[WorkerStanding, ...]
    is_known: bool = True

    def arrivals_at(self, ahead_s: float) -> float:
        """Requests per second, so far ahead."""
        return damped(self.arrival_rate, self.arrival_trend, self.trend_s, ahead_s)

    def capacity(self, roles: Iterable[Roles]) -> dict[Stage, float]:
        """Workers that each stage has of workers with such roles, by the needs of this load."""
        total = dict.fromkeys(self.stages, 0.0)
        for each in roles:
            for stage in each & total.keys():
                total[stage] += time_share(
                    each, stage, {name: load.need for name, load in self.stages.items()}
                )
        return total


def damped(rate: float, slope: float, memory_s: float, ahead_s: float) -> float:
    """A rate with a trend that is believed less the farther it is drawn out; at least 0."""
    return max(0.0, rate + slope * memory_s * (1 - math.exp(-ahead_s / memory_s)))


def time_share(roles: Roles, stage: Stage, needs: Mapping[Stage, StageNeed]) -> float:
    """The share of a worker's time that goes to one of its stages: by what a request takes of each."""
    if len(roles) == 1:
        return 1.0
    seconds = {each: needs[each].share * needs[each].request_s for each in roles if each in needs}
    total = sum(seconds.values())
    return seconds.get(stage, 0.0) / total if 0 < total < math.inf else 1 / len(roles)
