"""Plans from traffic: requests that a workload describes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from epd.planning.goodput import KEEPS_UP, Demand
from epd.planning.search import Planner
from epd.planning.space import Space
from epd.profiles.profile import Profile
from epd.simulate.deployment import Deployment
from epd.simulate.frame_choice import NO_WISHES, VideoWishes
from epd.simulate.requests import Job, JobMaker
from epd.topology import parse_topology
from epd.workload.config import WorkloadConfig
from epd.workload.metrics import SLO

# Requests to plan for: more change the plan little.
MOST_REQUESTS = 250
# Arrivals are simulated for at most this many times the longest that a request may take, and at least for so
# many times that one takes with full batches, to its first token and to its last.
_HORIZON, _FIRST_TOKENS, _ANSWERS = 5.0, 20.0, 2.0
_BASE = Deployment(parse_topology("1epd"))


def planner_for(
    profile: Profile,
    jobs: Sequence[Job],
    slo: SLO,
    space: Space,
    *,
    attainment: float = 0.9,
    base: Deployment = _BASE,
) -> Planner:
    """Returns a planner for requests with objectives.

    slo: of a first token, a token after it, or both
    attainment: share of the requests that must meet it
    base: all settings that are not searched for
    """
    longest_s = (slo.ttft_s or 1.0) + (slo.tpot_s or 0.05) * max(job.output_tokens for job in jobs)
    alone_s = tuple(_alone_s(profile, job) for job in jobs)
    settle_s = _settle_s(profile, jobs, fmean(alone_s), slo, base)
    demand = Demand.of(jobs, slo, attainment, _HORIZON * longest_s, settle_s, alone_s)
    return Planner(profile, demand, space, base)


def _alone_s(profile: Profile, job: Job) -> float:
    """Returns what encode and prefill of a request take on one worker each."""
    tokens = job.num_prompt_tokens
    encode_s = profile.encode.cost.seconds(job.num_patches, len(job.groups)) if job.groups else 0.0
    return encode_s + profile.prefill.cost.seconds(tokens, tokens * (tokens + 1) / 2)


def _settle_s(profile: Profile, jobs: Sequence[Job], alone_s: float, slo: SLO, base: Deployment) -> float:
    """Returns how long requests must arrive until a layout is as busy as it will be: stages, steps, queues.

    No longer than a queue needs to exceed the objective by far. alone_s: mean of `_alone_s`.
    """
    batch = base.decode.max_num_seqs
    steps_s = fmean(
        job.output_tokens * profile.decode.cost.seconds(batch, batch * job.num_prompt_tokens) for job in jobs
    )
    queues_s = min(_FIRST_TOKENS * alone_s, (slo.ttft_s or math.inf) / KEEPS_UP)
    return max(queues_s, _ANSWERS * (alone_s + steps_s))


def workload_jobs(
    profile: Profile, config: WorkloadConfig, seed: int, wishes: VideoWishes = NO_WISHES
) -> list[Job]:
    """Returns requests of a workload, at most MOST_REQUESTS. wishes: for their videos."""
    fields = {"num_requests": MOST_REQUESTS, "duration_s": None, "rate": config.rate or 1.0}
    requests = config.model_copy(update=fields).resolve().requests(seed)
    return list(JobMaker(profile, wishes=wishes).jobs(requests))
