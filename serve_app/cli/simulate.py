"""The command `epd simulate`, which reports a table, a record, a plot, or a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from epd import console
from epd.errors import RequestError
from epd.picture import picture
from epd.planning.asked import cut_by, draft_plan, workload_config
from epd.planning.bounds import Bound, bounds
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile as LoadedProfile
from epd.serve_app.cli.flags import with_options_of
from epd.serve_app.cli.options import ChromeTrace, IsJson, Plot, Profile
from epd.serve_app.cli.traffic_options import FleetOptions, NumRequests, Rate
from epd.simulate import Deployment, JobMaker, Sharding, Simulation, SimulationResult
from epd.simulate.clock import TICKS_PER_S
from epd.topology import parse_topology
from epd.workload.chrome_trace import Event, complete, dumps, named
from epd.workload.config import WorkloadConfig
from epd.workload.metrics import SLO, Latency

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

# Stand for all requests where work is averaged.
_TYPICAL_REQUESTS = 1000
# Above this load queues are what users wait for.
_BUSY = 0.7
# A simulated fleet may be larger than one that epd serve starts.
_MAX_WORKERS = 4096
_TICKS_PER_US = 10**6
_SPANS = (
    ("wait", "due", "placed"),
    ("read media", "placed", "media_read"),
    ("encode", "media_read", "encoded"),
    ("prefill", "encoded", "first_token"),
    ("decode", "first_token", "end"),
)
_STAGES = (
    ("wait for room", "due", "placed"),
    ("read media", "placed", "media_read"),
    ("encode, rest", "media_read", "encoded"),
    ("prefill, rest", "encoded", "first_token"),
    ("hand-over", "first_token", "adopted"),
)


@with_options_of(FleetOptions)
def simulate(
    profile: Profile = "qwen2.5-vl-7b@a100-80gb",
    topology: _Topology = "2e1p1d",
    rate: Rate = None,
    num_requests: NumRequests = None,
    sharding: _Sharding = "groups",
    whole: _IsWhole = False,
    as_json: IsJson = False,
    chrome_trace: ChromeTrace = None,
    plot: Plot = None,
    **options: Any,
) -> None:
    """Simulate a fleet.

    Runs requests of a workload through the live scheduler, router and admission on a topology. Caches are
    simulated where media repeat. By default 16 threads read media.
    """
    asked = FleetOptions(**options)
    loaded = cut_by(load_profile(profile), asked.group_tokens)
    config = workload_config(
        loaded.media,
        asked.workload,
        rate=rate,
        num_requests=num_requests,
        trace=asked.trace,
        **asked.repeats,
    )
    threads = 16 if asked.cpu_threads is None else asked.cpu_threads
    deployment = _deployment(topology, sharding, whole, threads, has_repeats=config.resolve().has_repeats)
    drafts = draft_plan(asked.draft_acceptance, asked.max_draft)
    deployment = replace(
        deployment, video_gpus=asked.video_gpus, encode_beside=asked.encode_beside, drafts=drafts
    )
    result = _run(loaded, deployment, config, asked.seed, has_spans=chrome_trace is not None)
    slo = SLO(asked.slo_ttft_s, asked.slo_tpot_s)
    busiest = _busiest(loaded, deployment, config, asked.seed, slo)
    load = busiest.load(_arrivals_per_s(result))
    if as_json:
        console.print_json(
            _result_record(result, slo)
            | {"binds": {"what": busiest.what, "load": load, "max_per_s": busiest.rate_per_s}}
        )
    else:
        _print_result(result, slo, console.stdout_console())
        console.stdout_console().print(_binds_line(busiest, load))
    if chrome_trace is not None:
        chrome_trace.write_text(_trace_of(result), encoding="utf-8")
    if plot is not None:
        _plot_simulation(result, plot)


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


def _latencies(result: SimulationResult) -> dict[str, Latency | None]:
    """Returns TTFT, TPOT and E2E, and the stages that make up TTFT, which follow one another."""
    figures = {"TTFT": result.ttft_s, "TPOT": result.tpot_s, "E2E": result.e2e_s}
    figures |= {name: result.seconds(start, stop) for name, start, stop in _STAGES}
    return {name: Latency.of(map(float, values)) for name, values in figures.items()}


def _result_record(result: SimulationResult, slo: SLO) -> dict[str, Any]:
    """Returns the record that `--json` prints. Seconds; without an objective no share keeps it."""
    duration_s = float(result.rows["end"].max()) / 1e12
    good = None if slo.is_empty else result.attainment(slo)
    return {
        "num_requests": len(result.rows),
        "num_refused": int(result.rows["is_refused"].sum()),
        "num_preempted": result.num_preempted,
        "num_prompt_tokens": int(result.rows["prompt_tokens"].sum()),
        "num_cached_tokens": int(result.rows["cached_tokens"].sum()),
        "num_groups": result.num_groups,
        "num_groups_encoded": result.num_encoded,
        "duration_s": duration_s,
        "slo_attainment": good,
        "goodput_per_s": None if good is None else good * len(result.rows) / duration_s,
        "latencies": {
            name: {"mean_s": each.mean_s, "p50_s": each.p50_s, "p90_s": each.p90_s, "p99_s": each.p99_s}
            for name, each in _latencies(result).items()
            if each is not None
        },
        "switches": [
            {"at_s": at_s, "worker": worker, "roles": roles} for at_s, worker, roles in result.switches
        ],
    }


def _print_result(result: SimulationResult, slo: SLO, console: Console) -> None:
    table = Table("seconds", box=None, pad_edge=False)
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, each in _latencies(result).items():
        if each is not None:
            values = (each.mean_s, each.p50_s, each.p90_s, each.p99_s)
            table.add_row(name, *(f"{value:.4g}" for value in values))
    console.print(table)
    record = _result_record(result, slo)
    kept = "no objective is given, so none is kept or missed"
    if record["slo_attainment"] is not None:
        kept = f"{record['slo_attainment']:.1%} kept the objectives, {record['goodput_per_s']:.3g} a second"
    console.print(
        f"{record['num_requests']} requests in {record['duration_s']:.1f} s simulated; "
        f"{record['num_refused']} refused, {record['num_preempted']} times one gave way; {kept}"
    )
    if result.rows["cached_tokens"].any():
        share = record["num_cached_tokens"] / record["num_prompt_tokens"]
        console.print(
            f"caches had {share:.0%} of the prompts' tokens; {record['num_groups_encoded']} of "
            f"{record['num_groups']} groups of media were encoded"
        )
    for switch in record["switches"]:
        console.print(f"at {switch['at_s']:.1f} s {switch['worker']} became {switch['roles']}")


def _plot_simulation(result: SimulationResult, path: Path) -> None:
    """Writes one picture: the distributions of TTFT and TPOT, and TTFT over time."""
    with picture(path, 16.5, 4.2) as figure:
        axes = figure.subplots(1, 3)
        for axis, name, values in ((axes[0], "TTFT", result.ttft_s), (axes[1], "TPOT", result.tpot_s)):
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            axis.step(np.sort(values), shares, where="post")
            axis.set(xlabel=f"{name}, s", ylabel="share of requests")
        rows = result.rows[~result.rows["is_refused"]]
        axes[2].plot(rows["due"] / TICKS_PER_S, (rows["first_token"] - rows["due"]) / TICKS_PER_S, ".")
        axes[2].set(xlabel="arrival, s", ylabel="TTFT, s")


def _trace_of(result: SimulationResult) -> str:
    """Returns JSON. Process 1: a row for each worker. Process 2: a row for each request, by stage."""
    return dumps([*_worker_events(result), *_request_events(result)])


def _worker_events(result: SimulationResult) -> Iterator[Event]:
    rows = {name: row for row, name in enumerate(dict.fromkeys(span.worker for span in result.spans))}
    for name, row in rows.items():
        yield named("thread_name", row, name)
    for span in result.spans:
        yield complete(span.name, rows[span.worker], span.start / _TICKS_PER_US, span.ticks / _TICKS_PER_US)


def _request_events(result: SimulationResult) -> Iterator[Event]:
    for row in result.rows:
        for name, start, stop in _SPANS:
            if 0 <= row[start] < row[stop]:
                start_us = int(row[start]) / _TICKS_PER_US
                duration_us = int(row[stop] - row[start]) / _TICKS_PER_US
                yield complete(name, int(row["index"]), start_us, duration_us, process=2)
