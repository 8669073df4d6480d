"""Turns the options of `epd plan` and `epd simulate`, and their traffic, into what runs.

`plan` is `epd.plan` in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from epd.errors import RequestError
from epd.kv.drafting import DEFAULT_MAX_DRAFT
from epd.planning.goodput import KEEPS_UP, Demand
from epd.planning.plan import Plan, make_plan
from epd.planning.search import OnProgress, Planner
from epd.planning.space import MAX_CELL, Space, cells_of
from epd.profiles.accelerators import CATALOGUE, Devices
from epd.profiles.files import load_profile
from epd.profiles.media import MediaRule
from epd.profiles.profile import Profile
from epd.simulate import Deployment
from epd.simulate.drafting import DraftPlan
from epd.simulate.frame_choice import NO_WISHES, VideoWishes
from epd.simulate.kept_media import KeptMedia
from epd.simulate.requests import Job, JobMaker
from epd.topology import parse_topology
from epd.workload.config import WorkloadConfig, load_workload
from epd.workload.metrics import SLO

DEFAULT_PROFILE = "qwen2.5-vl-7b@a100-80gb"
_DEGREES = (1, 2, 4, 8)
_RETENTIONS = (1.0, 0.5, 0.25)
_CPU_THREADS = 64
# Requests to plan for: more change the plan little.
MOST_REQUESTS = 250
# Arrivals are simulated for at most this many times the longest that a request may take, and at least for so
# many times that one takes with full batches, to its first token and to its last.
_HORIZON, _FIRST_TOKENS, _ANSWERS = 5.0, 20.0, 2.0
_BASE = Deployment(parse_topology("1epd"))


def plan(
    gpus: int = 8,
    *,
    profile: str = DEFAULT_PROFILE,
    workload: str | None = None,
    slo_ttft_s: float | None = None,
    slo_tpot_s: float | None = None,
    attainment: float = 0.9,
    min_rate: float | None = None,
    min_retention: float = 1.0,
    max_tensor_parallel: int = 1,
    encoders: int = 0,
    encoder_profile: str | None = None,
    cpu_threads: int | None = None,
    video_gpus: int = 0,
    encode_beside: bool = True,
    group_tokens: int | None = None,
    draft_acceptance: float = 0.0,
    max_draft: int = DEFAULT_MAX_DRAFT,
    cache_mb_per_s: float | None = None,
    seed: int = 0,
    wishes: VideoWishes = NO_WISHES,
    devices: Devices = CATALOGUE,
    on_progress: OnProgress | None = None,
    **requests: Any,
) -> Plan:
    """Searches for the topology with the highest goodput per device, as `epd plan` does by the same options.

    profile: MODEL@DEVICE or a file of `epd profile`
    workload: a preset or a file; by default images
    slo_ttft_s, slo_tpot_s: seconds; without any, the rate that is kept up with
    min_rate: requests per second that the plan must serve
    encoders, encoder_profile: devices of another kind that encode for all others, and their profile
    cpu_threads: that read media on each machine; by default its cores, or 64 where these are not known
    video_gpus: of each machine, that decode videos beside them
    cache_mb_per_s: that a disk reads of media that came before, as `epd serve --cache-dir` has; None for none
    wishes: what requests name for their videos
    devices: that a profile may name
    requests: fields of the workload in place of its own, such as `rate`, `trace`, `repeat_rate`
    on_progress: called with (candidates done, candidates in all)
    Raises RequestError for a bad option, InfeasibleError if no topology meets the objectives.
    """
    _check(max_tensor_parallel, {"attainment": attainment, "min retention": min_retention})
    _check_encoders(encoders, encoder_profile, gpus, max_tensor_parallel)
    loaded = cut_by(load_profile(profile, devices), group_tokens)
    beside = None if encoder_profile is None else cut_by(load_profile(encoder_profile, devices), group_tokens)
    if beside is not None:
        Deployment(parse_topology("1e1pd")).memory(beside, frozenset({"encode"}))  # raises where none fits
        loaded = loaded.encoding_on(beside, encoders, gpus)
    loaded.on(max_tensor_parallel)  # raises where the profile cannot tell
    config = workload_config(loaded.media, workload, **requests)
    cells = cells_of(gpus)
    planner = planner_for(
        loaded,
        workload_jobs(loaded, config, seed, wishes),
        SLO(slo_ttft_s, slo_tpot_s),
        Space(
            cells[0][1],
            retentions=tuple(share for share in _RETENTIONS if share >= min_retention),
            degrees=tuple(each for each in _DEGREES if each <= max_tensor_parallel),
            num_encoders=encoders,
        ),
        attainment=attainment,
        base=replace(
            _BASE,
            cpu_threads=_threads_beside(loaded, cells[0][1]) if cpu_threads is None else cpu_threads,
            video_gpus=video_gpus,
            enable_prefix_caching=config.resolve().has_repeats,
            drafts=draft_plan(draft_acceptance, max_draft),
            kept=_kept(cache_mb_per_s, has_repeats=config.resolve().has_repeats),
            encode_beside=encode_beside,
        ),
    )
    return make_plan(planner, cells=cells, min_rate=min_rate, encoders=beside, on_progress=on_progress)


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


def _kept(mb_per_s: float | None, *, has_repeats: bool) -> KeptMedia | None:
    """Returns a disk that gets what is computed. Raises RequestError for one of which nothing is read."""
    if mb_per_s is None:
        return None
    if not has_repeats:
        raise RequestError(
            f"received --cache-mb-per-s {mb_per_s:g} and a workload in which no media come again; allowed: "
            "with a repeat_rate or questions_per_media; leave it out"
        )
    return KeptMedia(mb_per_s * 1e6, has_all=False)


def _threads_beside(profile: Profile, num_devices: int) -> int:
    """Returns the threads of a machine with so many devices, where they are known."""
    return _CPU_THREADS if profile.cores_per_device is None else profile.cores_per_device * num_devices


def _check(degree: int, shares: dict[str, float]) -> None:
    """Raises RequestError for options that no plan can have."""
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise RequestError(f"{name} is {share}, it must be above 0 and at most 1")
    if degree not in _DEGREES:
        raise RequestError(f"max tensor parallel is {degree}, it must be 1, 2, 4 or 8")


def _check_encoders(encoders: int, profile: str | None, gpus: int, degree: int) -> None:
    """Raises RequestError for encoders without a profile, and for more devices than one cell has."""
    is_one_cell = encoders + gpus <= MAX_CELL and degree == 1
    if (encoders > 0) != (profile is not None) or encoders < 0 or (encoders and not is_one_cell):
        raise RequestError(
            f"received {encoders} encoders with the profile {profile} beside {gpus} devices; allowed: both "
            f"options, {MAX_CELL} devices in all and one a worker; give --encoders 4 --encoder-profile "
            "MODEL@DEVICE"
        )


def draft_plan(acceptance: float, max_draft: int) -> DraftPlan | None:
    """Returns what drafts are worth; None for no drafts."""
    drafts = DraftPlan(acceptance, max_draft)
    return drafts if acceptance else None


def cut_by(profile: Profile, group_tokens: int | None) -> Profile:
    """Returns the profile with groups of as many tokens; None for those that it has."""
    if group_tokens is None:
        return profile
    return replace(profile, media=replace(profile.media, group_tokens=group_tokens))


def workload_config(media: MediaRule, source: str | None, **options: Any) -> WorkloadConfig:
    """Returns a preset or a file, with the options that are given. media: of the model."""
    fields = {name: value for name, value in options.items() if value is not None}
    model = {"token_side": media.patch * media.merge, "frames_per_s": media.video_fps}
    return load_workload(source or (None if "trace" in fields else "images"), fields | model)
