"""Calibrates the application's costs beside its models, so that the simulator answers as the application did.

Both get the same requests at the same times, the simulator at the speed that the cores had. Costs of
`HostCosts`, none below 0, are those with the least squares of relative errors of all medians; from steps of
Gauss and Newton, each figure a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.score.app_costs import Figures, median
from benchmarks.score.shared_cores import WAYS, HostCosts, HostedProfile
from benchmarks.score.speed import at_speed
from epd.profiles.cost import nonnegative_fit
from epd.profiles.profile import Profile
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.deployment import Deployment
from epd.simulate.requests import GroupWork, Job, JobMaker
from epd.simulate.simulation import Simulation
from epd.topology import parse_topology
from epd.types import Float64Array
from epd.workload.requests import Workload

# Fields of `HostCosts` beside WAYS: in the workers of a request.
_IN_WORKERS = ("encode_s", "prefill_s", "decode_s")
# Actions that take time beside the way of a request, too.
# Those of "media" would not be told from those of tokens: texts have more of them.
_BESIDE = ("request", "split", "image", "video", "sent")
_NUM_ROUNDS, _STEP_S = 3, 0.002
# Larger relative errors count by their size, not its square: what disturbs the machine is in a few answers.
_LARGE = 0.1


@dataclass(frozen=True, slots=True)
class Asked:
    """Holds the questions to a layout and its answers. core_speed: meanwhile."""

    topology: str
    workload: Workload
    seed: int
    figures: Figures
    core_speed: float


def kept_job(job: Job, retention: float) -> Job:
    """Returns the job with that share of its visual tokens, rounded, with at least one in each group."""
    groups: list[GroupWork] = []
    num_kept = num_before = 0
    for group in job.groups:
        num_before += group.media.num_tokens
        here = min(max(1, round(retention * num_before) - num_kept), group.media.num_tokens)
        groups.append(replace(group, media=replace(group.media, num_tokens=here)))
        num_kept += here
    return replace(job, groups=tuple(groups))


def simulated_figures(
    profile: Profile, deployment: Deployment, workload: Workload, seed: int, *, retention: float = 1.0
) -> Figures:
    """Returns the figures of the same requests in the simulator. retention: share of visual tokens kept."""
    is_hosted = isinstance(profile, HostedProfile)
    simulation = profile.simulation(deployment) if is_hosted else Simulation(profile, deployment)
    jobs = JobMaker(profile).jobs(workload.requests(seed))
    result = simulation.run(jobs if retention == 1 else (kept_job(job, retention) for job in jobs))
    rows = result.rows
    return Figures(
        ttft_s=median(result.ttft_s),
        tpot_s=median(result.tpot_s),
        encode_s=median(rows["encode_ticks"]) / TICKS_PER_S,
        prefill_s=median(rows["prefill_ticks"]) / TICKS_PER_S,
        cpu_s=simulation.work_s / len(rows),
        prompt_tokens=median(rows["prompt_tokens"]),
        cached_tokens=0.0,
    )


def calibrated(profile: HostedProfile, asked: Sequence[Asked]) -> HostedProfile:
    """Returns the profile, whose host gives the cores, with the costs of the application."""
    live = np.concatenate([_times(each.figures) for each in asked])
    counted = live > 0

    def times(host: HostCosts) -> Float64Array:
        found = replace(profile, host=host)
        return np.concatenate([_times(_simulated(found, each)) for each in asked])[counted]

    def error(host: HostCosts) -> float:
        return float((_weights(errors := times(host) / live[counted] - 1) * errors**2).sum())

    hosts = [profile.host]
    for _ in range(_NUM_ROUNDS):
        host = _improved(hosts[-1], times, live[counted])
        hosts.append(_with_beside(host, _beside(replace(profile, host=host), asked)))
    return replace(profile, host=min(hosts, key=error))


def _simulated(profile: HostedProfile, asked: Asked) -> Figures:
    deployment = Deployment(parse_topology(asked.topology), cpu_threads=profile.host.num_cores)
    return simulated_figures(at_speed(profile, asked.core_speed), deployment, asked.workload, asked.seed)


def _times(figures: Figures) -> Float64Array:
    return np.array([figures.ttft_s, figures.tpot_s, figures.encode_s, figures.prefill_s])


def _improved(host: HostCosts, times: Callable[[HostCosts], Float64Array], live: Float64Array) -> HostCosts:
    """Takes one step of Gauss and Newton; slopes come from adding _STEP_S to each cost."""
    costs, now = _costs(host), times(host)
    more = [times(_with_costs(host, costs + _STEP_S * unit)) for unit in np.eye(len(costs))]
    slopes = (np.stack(more, axis=1) - now[:, None]) / _STEP_S
    scale = np.sqrt(_weights(now / live - 1)) / live
    found = nonnegative_fit(slopes * scale[:, None], (live - now + slopes @ costs) * scale)
    return _with_costs(host, np.array(found))


def _weights(errors: Float64Array) -> Float64Array:
    """Returns how much each square counts, after Huber: 1 for small errors."""
    return _LARGE / np.maximum(np.abs(errors), _LARGE)


def _costs(host: HostCosts) -> Float64Array:
    ways = [getattr(host, name).work_s for name in WAYS]
    return np.array(ways + [getattr(host, name) for name in _IN_WORKERS])


def _with_costs(host: HostCosts, costs: Float64Array) -> HostCosts:
    values = iter(map(float, costs))
    fields: dict[str, Any] = {name: replace(getattr(host, name), work_s=next(values)) for name in WAYS}
    fields |= dict(zip(_IN_WORKERS, values, strict=True))
    return replace(host, **fields)


def _beside(profile: HostedProfile, asked: Sequence[Asked]) -> list[float]:
    """Returns the CPU seconds that the simulation lacks, for each of the ways of _BESIDE and each token."""
    nothing = [0.0] * (len(_BESIDE) + 1)
    silent = replace(profile, host=_with_beside(profile.host, nothing))
    speeds = np.array([each.core_speed for each in asked])
    lacking = speeds * [each.figures.cpu_s - _simulated(silent, each).cpu_s for each in asked]
    return nonnegative_fit(
        np.array([_num_gone(each, profile) for each in asked]), lacking / profile.core_speed
    )


def _num_gone(asked: Asked, profile: HostedProfile) -> list[float]:
    """Counts how often a request goes each of the ways of _BESIDE, and its output tokens; on average.

    An image goes its way twice: see `HostCosts`.
    """
    jobs = list(JobMaker(profile).jobs(asked.workload.requests(asked.seed)))
    roles = [worker.roles for worker in parse_topology(asked.topology).workers()]
    is_split = not any({"prefill", "decode"} <= each for each in roles)
    is_sent = not any({"encode", "prefill"} <= each for each in roles)
    groups = [group.is_video for job in jobs for group in job.groups]
    videos, images = sum(groups) / len(jobs), (len(groups) - sum(groups)) / len(jobs)
    tokens = sum(job.output_tokens for job in jobs) / len(jobs)
    return [1.0, float(is_split), 2 * images, videos, is_sent * (images + videos), tokens]


def _with_beside(host: HostCosts, costs: Sequence[float]) -> HostCosts:
    values = iter(costs)
    fields: dict[str, Any] = {name: replace(getattr(host, name), beside_s=next(values)) for name in _BESIDE}
    return replace(host, **fields, token_s=next(values))
