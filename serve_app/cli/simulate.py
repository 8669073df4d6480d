"""The command `epd simulate`."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Annotated, get_args

import typer

from epd import console
from epd.errors import RequestError
from epd.kv.drafting import DEFAULT_MAX_DRAFT
from epd.kv.scheduled_request import RequestOrder
from epd.kv.scheduling import SchedulerConfig
from epd.planning.asked import cut_by, draft_plan, num_cpu_threads, workload_config
from epd.planning.bounds import Bound, bounds
from epd.profiles import Profile as LoadedProfile
from epd.profiles.files import load_profile
from epd.serve_app.cli.options import (
    ChromeTrace,
    CpuThreads,
    DraftAcceptance,
    EncodesBeside,
    GroupTokens,
    IsJson,
    MaxDraft,
    NumRequests,
    Plot,
    Profile,
    QuestionsPerMedia,
    Rate,
    RepeatRate,
    RepeatSkew,
    Seed,
    SloTpot,
    SloTtft,
    Trace,
    Workload,
)
from epd.simulate import Deployment, JobMaker, Sharding, Simulation, SimulationResult
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.report import chrome_trace as trace_of
from epd.simulate.report import plot_simulation, print_result, result_record
from epd.topology import parse_topology
from epd.workload.config import WorkloadConfig
from epd.workload.metrics import SLO

_Topology = Annotated[
    str, typer.Option(metavar="T", help="Workers and their roles, such as 2e1p1d, 1ep1d or 8epd.")
]
_Sharding = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="Where one request's groups are encoded: groups (on all encoders), request (on one) or local "
        "(where they are prefilled).",
    ),
]
_IsWhole = Annotated[
    bool, typer.Option("--whole", help="Run the stages of a request one after another, without overlap.")
]

_Order = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="Which request is encoded and prefilled next: fcfs, shortest (long ones may starve) or "
        "least_slack (which must start first, each with the same objective).",
    ),
]

# Stand for all requests where work is averaged.
_TYPICAL_REQUESTS = 1000
# Above this load queues are what users wait for.
_BUSY = 0.7
# A simulated fleet may be larger than one that epd serve starts.
_MAX_WORKERS = 4096


def simulate(
    profile: Profile = "qwen2.5-vl-7b@a100-80gb",
    topology: _Topology = "2e1p1d",
    workload: Workload = None,
    rate: Rate = None,
    num_requests: NumRequests = None,
    trace: Trace = None,
    repeat_rate: RepeatRate = None,
    repeat_skew: RepeatSkew = None,
    questions_per_media: QuestionsPerMedia = None,
    seed: Seed = 0,
    sharding: _Sharding = "groups",
    order: _Order = "fcfs",
    whole: _IsWhole = False,
    encode_beside: EncodesBeside = True,
    group_tokens: GroupTokens = None,
    draft_acceptance: DraftAcceptance = 0.0,
    max_draft: MaxDraft = DEFAULT_MAX_DRAFT,
    cpu_threads: CpuThreads = None,
    slo_ttft_s: SloTtft = None,
    slo_tpot_s: SloTpot = None,
    as_json: IsJson = False,
    chrome_trace: ChromeTrace = None,
    plot: Plot = None,
) -> None:
    """Simulate a fleet.

    Runs requests of a workload through the live scheduler, router and admission on a topology. Caches are
    simulated where media repeat. By default 16 threads read media, or the cores of the profile's machine.
    """
    loaded = cut_by(load_profile(profile), group_tokens)
    config = workload_config(
        loaded.media,
        workload,
        rate=rate,
        num_requests=num_requests,
        trace=trace,
        repeat_rate=repeat_rate,
        repeat_skew=repeat_skew,
        questions_per_media=questions_per_media,
    )
    threads = num_cpu_threads(cpu_threads, loaded, 16)
    deployment = _deployment(topology, sharding, whole, threads, has_repeats=config.resolve().has_repeats)
    limits = _ordered(deployment.language, order)
    drafts = draft_plan(draft_acceptance, max_draft)
    deployment = replace(deployment, language=limits, encode_beside=encode_beside, drafts=drafts)
    result = _run(loaded, deployment, config, seed, has_spans=chrome_trace is not None)
    slo = SLO(slo_ttft_s, slo_tpot_s)
    busiest = _busiest(loaded, deployment, config, seed, slo)
    load = busiest.load(_arrivals_per_s(result))
    if as_json:
        console.print_json(
            result_record(result, slo)
            | {"binds": {"what": busiest.what, "load": load, "max_per_s": busiest.rate_per_s}}
        )
    else:
        print_result(result, slo, console.stdout_console())
        console.stdout_console().print(_binds_line(busiest, load))
    if chrome_trace is not None:
        chrome_trace.write_text(trace_of(result), encoding="utf-8")
    if plot is not None:
        plot_simulation(result, plot)


def _deployment(
    topology: str, sharding: str, whole: bool, cpu_threads: int, *, has_repeats: bool
) -> Deployment:
    if sharding not in get_args(Sharding):
        raise RequestError(f"sharding is {sharding!r}, it must be groups, request or local")
    parsed = parse_topology(topology, _MAX_WORKERS)
    if sharding == "local" and not all("encode" in g.roles for g in parsed.groups if "prefill" in g.roles):
        raise RequestError(
            f"--sharding local encodes at the prefill workers, which {topology} cannot; use ep or epd workers"
        )
    return Deployment(
        parsed,
        sharding=sharding,  # type: ignore[arg-type]  # checked above
        is_overlapped=not whole,
        cpu_threads=cpu_threads,
        enable_prefix_caching=has_repeats,
    )


def _busiest(
    profile: LoadedProfile, deployment: Deployment, config: WorkloadConfig, seed: int, slo: SLO
) -> Bound:
    """Returns the tightest limit of the rate, by the first of the same requests."""
    jobs = list(islice(JobMaker(profile).jobs(config.resolve().requests(seed)), _TYPICAL_REQUESTS))
    return bounds(profile, deployment, jobs, slo)[0]


def _arrivals_per_s(result: SimulationResult) -> float:
    """Returns the rate of arrivals; 0 of a single request."""
    due = result.rows["due"]
    span = int(due.max() - due.min())
    return (len(due) - 1) * TICKS_PER_S / span if span else 0.0


def _binds_line(busiest: Bound, load: float) -> str:
    """Returns what is busiest, for people; its cure where it has too little time left."""
    line = f"busiest is {busiest.what}, at {load:.0%} of the {busiest.rate_per_s:.3g} requests/s it can do"
    return f"{line}: {busiest.cure}" if load > _BUSY else line


def _ordered(limits: SchedulerConfig, order: str) -> SchedulerConfig:
    if order not in get_args(RequestOrder):
        raise RequestError(f"order is {order!r}, it must be {', '.join(get_args(RequestOrder))}")
    return replace(limits, order=order)  # type: ignore[arg-type]  # checked above


def _run(
    profile: LoadedProfile, deployment: Deployment, config: WorkloadConfig, seed: int, *, has_spans: bool
) -> SimulationResult:
    simulation = Simulation(profile, deployment, has_spans=has_spans)
    workload = config.resolve()
    if not workload.is_open_loop:
        raise RequestError("a closed loop has no arrival times to simulate; give --rate and another arrival")
    jobs = JobMaker(profile).jobs(workload.requests(seed))
    with console.progress_bar("requests") as show:
        num = config.num_requests
        return simulation.run(jobs, None if num is None else lambda done: show(done, num))
