"""What elasticity is decided on: metrics of workers, and the load of a cluster made of them. Frozen.

The same metrics come from the live system and from the simulator:

    stage     unit            queued_units                                   a round
    encode    patch           given to it, not encoded                       one batch
    prefill   prompt token    given to it, not computed, media missing too   one pass with a prompt in it
    decode    output token    0: how long answers get is estimated           one pass without a prompt

A worker's *work* at a stage is in seconds of one worker, at the rate that was measured. Requests count
wherever they are: where answers are generated side by side a queue cannot be told from a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epd.routing import Stage

Roles = frozenset[Stage]


@dataclass(frozen=True, slots=True)
class RequestWork:
    """What one request will take of each stage, as planned on its arrival. max_tokens: of its answer."""

    num_patches: int
    num_prompt_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.num_patches < 0 or self.num_prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(f"a request has a prompt and an answer of at least 1 token, got {self}")


@dataclass(frozen=True, slots=True)
class StageSample:
    """One stage of one worker. queued_units, num_requests: now. The others are totals that only grow.

    num_requests: at this stage; for decode, those whose prompt is there and whose answer is not complete.
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
class StageLoad:
    """One stage of the whole cluster.

    num_workers: that serve it; a worker of several roles counts by the share of its time that it needs here.
    num_requests: at this stage, a fraction where several workers share one. queued_s: seconds of work of one
    worker that they are. round_s, request_s: a worker with b requests does one part of each in round_s +
    request_s * b; num_parts: of a request. max_batch: requests at once on one worker; None: no limit known.
    utilisation: share of the time that its workers were busy since the last look. predicted: needed share of
    their time at the end of the horizon; above 1 a queue grows.
    """

    stage: Stage
    num_workers: float
    num_requests: float
    queued_s: float
    round_s: float
    request_s: float
    num_parts: float
    max_batch: float | None
    utilisation: float
    predicted: float

    @property
    def service_rate(self) -> float:
        """Requests per second that one worker can do, as many at once as it takes."""
        batch = self.max_batch
        part_s = self.request_s + (self.round_s / batch if batch else 0.0)
        seconds = self.num_parts * part_s
        return 1.0 / seconds if seconds > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """All that is known at `now_s`. arrival_rate, arrival_trend: requests per second, and its change per
    second. num_waiting: requests that no worker has taken yet. is_known: enough was seen to decide on."""

    now_s: float
    arrival_rate: float
    arrival_trend: float
    num_waiting: int
    stages: Mapping[Stage, StageLoad]
    workers: tuple[WorkerStanding, ...]
    is_known: bool = True
