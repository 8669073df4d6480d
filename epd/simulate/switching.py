"""Drives the live estimator and controller of roles with the work of simulated workers.

A switch follows the paper (EPD, section 3.4): offload, the worker gets nothing new and completes its work;
migrate and onload, `switch_s`; then it takes its new roles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from epd.control.arrivals import RequestWork
from epd.control.elasticity import (
    ControllerConfig,
    EstimatorConfig,
    RoleController,
    StageSample,
    Switch,
    TrafficEstimator,
    WorkerSample,
)
from epd.profiles.cost import StageCost
from epd.profiles.profile import Profile
from epd.simulate.requests import Job
from epd.simulate.worker import SimulatedWorker
from epd.topology import Stage

_MEAN_CONTEXT = 1024  # tokens that a decode step is assumed to read of each sequence, before any was measured


@dataclass(frozen=True, slots=True)
class Elasticity:
    """Configures both. max_tokens: that requests allow for answers; None: as many as they get.

    is_failing: whether a switch, drained and about to load, is to fail; its worker keeps its old roles.
    """

    controller: ControllerConfig = field(default_factory=ControllerConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    max_tokens: int | None = None
    is_failing: Callable[[Switch], bool] = lambda _: False


class RoleSwitching:
    """Decides switches by the load of a simulated fleet. Times in seconds."""

    def __init__(self, profile: Profile, elasticity: Elasticity) -> None:
        self.elasticity = elasticity
        config = replace(elasticity.controller, load_s=profile.switch_s)
        self.controller = RoleController(config)
        self.estimator = TrafficEstimator(elasticity.estimator, known_costs(profile))

    @property
    def interval_s(self) -> float:
        return self.controller.config.interval_s

    def arrived(self, now_s: float, job: Job) -> None:
        max_tokens = self.elasticity.max_tokens or job.output_tokens
        self.estimator.arrived(now_s, RequestWork(job.num_patches, job.num_prompt_tokens, max_tokens))

    def look(self, now_s: float, workers: Sequence[WorkerSample], num_waiting: int) -> Switch | None:
        return self.controller.decide(now_s, self.estimator.observe(now_s, workers, num_waiting=num_waiting))


def known_costs(profile: Profile) -> dict[Stage, StageCost]:
    """Returns the prior costs of the estimator."""
    decode = profile.decode.cost
    per_sequence_s = decode.per_unit_s + decode.per_item_s * _MEAN_CONTEXT
    decode = replace(decode, per_unit_s=per_sequence_s, per_item_s=0.0)
    return {"encode": profile.encode.cost, "prefill": profile.prefill.cost, "decode": decode}


def sample_of(worker: SimulatedWorker, since_s: float) -> WorkerSample:
    """Returns a simulated worker's metrics, for each stage that it has a side for."""
    stages: dict[Stage, StageSample] = {}
    kv_usage = None
    if worker.encoder is not None:
        stages["encode"] = worker.encoder.sample()
    if worker.language is not None:
        kv_usage = worker.language.kv.usage
        sides = worker.language.samples()
        stages |= {stage: sides[stage] for stage in sides.keys() & worker.roles}
    return WorkerSample(worker.name, worker.roles, since_s, stages, kv_usage, worker.is_switching)
