"""Measures goodput of a deployment: the highest rate at which enough requests meet their objectives.

bound     upper limit of the stages, from costs alone: no queue, no wait
search    between 0 and the bound by halving, each step a simulation of the same requests at another rate

A rate that is too high makes a queue that grows as long as requests arrive. So that it is seen, whatever the
objective, a request may wait for a share of the time of all arrivals at most:

    arrivals      |<---------------- at least settle_s ---------------->|
    first token   |<-->|<->|  KEEPS_UP of that, and twice what it takes alone; or the objective if it is less
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from epd.errors import InfeasibleError
from epd.planning.bounds import MeanWork, bounds, mean_work
from epd.profiles.profile import Profile
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.deployment import Deployment
from epd.simulate.records import RecordTable, SimulationResult
from epd.simulate.requests import Job, RequestState
from epd.simulate.simulation import Simulation
from epd.workload.metrics import SLO

# Closer to the bound a queue has no steady state: a short run would merely not show its growth.
MAX_LOAD = 0.95
_NUM_HALVINGS = 7  # of the bound, until an answer is exact enough
# At a load of 1 + x the last one waits for x of the arrivals' time; a tenth of all may miss the objectives.
KEEPS_UP = 0.1
_LEAST_REQUESTS = 100
_KEYS_APART, _NUM_KEYS = 0x9E3779B97F4A7C15, 2**62  # of content that comes again as new, and of all


@dataclass(frozen=True, slots=True)
class Demand:
    """Describes requests at a mean rate of one per second, objectives, and the share that must meet them.

    horizon_s: how long arrivals are simulated; at a rate that needs fewer requests than there are, only these
    are taken, at least a hundred.
    settle_s: how long at least; at a rate that needs more requests, they come again with new content
    alone_s: what the first token of each request takes without any other; empty where any wait within the
    objectives will do, so that a short run may meet them at a rate that no layout would keep up with
    """

    jobs: tuple[Job, ...]
    slo: SLO
    attainment: float = 0.9
    horizon_s: float = math.inf
    settle_s: float = 0.0
    alone_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.jobs or not 0 < self.attainment <= 1:
            raise ValueError(
                f"a demand needs requests and an attainment above 0, at most 1; got {len(self.jobs)} and "
                f"{self.attainment}"
            )

    @classmethod
    def of(
        cls,
        jobs: Sequence[Job],
        slo: SLO,
        attainment: float = 0.9,
        horizon_s: float = math.inf,
        settle_s: float = 0.0,
        alone_s: tuple[float, ...] = (),
    ) -> Demand:
        """Scales the times of `jobs` to one per second."""
        span = jobs[-1].due - jobs[0].due
        scale = TICKS_PER_S * (len(jobs) - 1) / span if span else 1.0
        scaled = tuple(replace(job, due=round((job.due - jobs[0].due) * scale)) for job in jobs)
        return cls(scaled, slo, attainment, horizon_s, settle_s, alone_s)

    def at(self, rate_per_s: float) -> list[Job]:
        """Returns the same requests, faster or slower."""
        num = len(self.jobs)
        if rate_per_s * self.horizon_s < num:
            num = min(num, max(_LEAST_REQUESTS, math.ceil(rate_per_s * self.horizon_s)))
        num = max(num, math.ceil(rate_per_s * self.settle_s), self._num_patient(rate_per_s))
        return [self._job(index, rate_per_s) for index in range(num)]

    def _num_patient(self, rate_per_s: float) -> int:
        """Returns the requests with which the objective alone binds, at most twice as many as there are."""
        if not self.alone_s or self.slo.ttft_s is None:
            return 0
        return min(2 * len(self.jobs), math.ceil(rate_per_s * self.slo.ttft_s / KEEPS_UP))

    def _job(self, index: int, rate_per_s: float) -> Job:
        """Returns a request, or the same again with new content."""
        again, place = divmod(index, len(self.jobs))
        job = self.jobs[place]
        due = round((job.due + again * len(self.jobs) * TICKS_PER_S) / rate_per_s)
        if not again:
            return replace(job, due=due)
        media_key, text_key = (
            (each + again * _KEYS_APART) % _NUM_KEYS for each in (job.media_key, job.text_key)
        )
        return replace(job, index=index, due=due, media_key=media_key, text_key=text_key)

    def first_token_ticks(self, jobs: Sequence[Job]) -> list[float]:
        """Returns how long each of the requests may take to its first token, as these arrive."""
        limit_s = math.inf if self.slo.ttft_s is None else self.slo.ttft_s
        wait_s = KEEPS_UP * (jobs[-1].due - jobs[0].due) / TICKS_PER_S
        alone_s = self.alone_s or (math.inf,)
        most_s = [min(limit_s, wait_s + 2 * each) for each in alone_s]
        return [TICKS_PER_S * most_s[place % len(most_s)] for place in range(len(jobs))]


def rate_bound(
    profile: Profile, deployment: Deployment, demand: Demand, work: MeanWork | None = None
) -> float:
    """Returns the requests per second that no schedule can exceed. work: as for `bounds`."""
    found = bounds(profile, deployment, demand.jobs, demand.slo, work)
    return found[0].rate_per_s if found else math.inf


def simulate_at(
    profile: Profile, deployment: Deployment, demand: Demand, rate_per_s: float
) -> SimulationResult:
    return Simulation(profile, deployment).run(demand.at(rate_per_s))


def goodput(
    profile: Profile,
    deployment: Deployment,
    demand: Demand,
    *,
    at_least: float = 0.0,
    known: float | None = None,
) -> float:
    """Returns requests per second; 0 if a trickle misses the objectives, or all above `at_least` does.

    The answer is exact to bound / 2 ** _NUM_HALVINGS, from below, and at most MAX_LOAD of the bound.
    known: an answer with another `at_least`; what follows from it is not simulated again.
    Raises InfeasibleError if memory binds.
    """
    high = MAX_LOAD * rate_bound(profile, deployment, demand)
    step = high / 2.0**_NUM_HALVINGS

    def is_kept(rate_per_s: float) -> bool:
        if known is not None and not known < rate_per_s < known + step:
            return rate_per_s <= known
        return keeps(profile, deployment, demand, rate_per_s)

    low = at_least + step
    if high < low or not is_kept(low):
        return 0.0
    while high - low > step:
        middle = (low + high) / 2
        if is_kept(middle):
            low = middle
        else:
            high = middle
    return low


class _DecidedError(Exception):
    """Ends a simulation. is_kept: whether enough requests meet the objectives."""

    def __init__(self, is_kept: bool) -> None:
        super().__init__()
        self.is_kept = is_kept


class _Verdict(RecordTable):
    """Counts requests that met the objectives, and ends the simulation once the others cannot change it."""

    def __init__(self, demand: Demand, jobs: Sequence[Job]) -> None:
        super().__init__()
        self._demand = demand
        limits = zip(jobs, demand.first_token_ticks(jobs), strict=True)
        self._first_token = {job.index: ticks for job, ticks in limits}
        self._num_requests = len(jobs)
        self._num_met = self._num_missed = 0

    def add(self, state: RequestState, end: int, *, is_refused: bool = False) -> None:
        is_late = state.first_token - state.job.due > self._first_token[state.job.index]
        is_met = not (is_refused or is_late) and _meets(self._demand.slo, state, end)
        self._num_met += is_met
        self._num_missed += not is_met
        if self._num_met / self._num_requests >= self._demand.attainment:
            raise _DecidedError(is_kept=True)
        if (self._num_requests - self._num_missed) / self._num_requests < self._demand.attainment:
            raise _DecidedError(is_kept=False)


def _meets(slo: SLO, state: RequestState, end: int) -> bool:
    """Returns whether one request meets the objectives, as `SimulationResult.attainment` counts it."""
    due, first_token = state.job.due, state.first_token
    num_gaps = max(state.job.output_tokens - 1, 1)
    ticks = (
        (slo.ttft_s, first_token - due),
        (slo.tpot_s, (end - first_token) / num_gaps),
        (slo.e2e_s, end - due),
    )
    return all(limit_s is None or took <= limit_s * TICKS_PER_S for limit_s, took in ticks)


def keeps(profile: Profile, deployment: Deployment, demand: Demand, rate_per_s: float) -> bool:
    """Returns whether enough requests meet their objectives at a rate."""
    jobs = demand.at(rate_per_s)
    simulation = Simulation(profile, deployment)
    simulation.records = _Verdict(demand, jobs)
    try:
        simulation.run(jobs)
    except _DecidedError as verdict:
        return verdict.is_kept
    raise AssertionError(f"{len(jobs)} requests ended without a verdict")


def unloaded(profile: Profile, deployment: Deployment, demand: Demand) -> tuple[float, float]:
    """Returns TTFT and TPOT, seconds, that the share `attainment` of requests meets without load."""
    few = replace(demand, jobs=demand.jobs[:32])
    work = mean_work(profile, deployment, few.jobs, few.slo)
    alone_s = sum((work.encode_s, work.prefill_s, work.decode_s, 1.0)) * 20
    result = simulate_at(profile, deployment, few, 1 / alone_s)
    if result.rows["is_refused"].any():
        raise InfeasibleError(
            "memory binds: a request does not fit into the KV cache of a worker; ask for less media or take "
            "a larger device"
        )
    place = min(len(few.jobs) - 1, int(demand.attainment * len(few.jobs)))
    ttft_s, tpot_s = sorted(result.ttft_s), sorted(result.tpot_s)
    return float(ttft_s[place]), float(tpot_s[min(place, len(tpot_s) - 1)]) if tpot_s else 0.0
