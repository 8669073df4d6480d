"""The verb `epd plan`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epd import console
from epd.cli.options import SloTpot, SloTtft
from epd.cli.simulate import num_threads, workload_config
from epd.errors import RequestError

if TYPE_CHECKING:
    from epd.planning.plan import Plan
    from epd.planning.search import Planner
    from epd.profiles import Profile
    from epd.workload.config import WorkloadConfig

_Gpus = Annotated[int, typer.Option("--gpus", metavar="N", help="Devices to lay out, 1 to 256.")]
_Profile = Annotated[
    str,
    typer.Option(metavar="FILE", help="Profile: a file of epd profile, or MODEL@DEVICE to compute one."),
]
_Workload = Annotated[
    str | None, typer.Option(metavar="NAME", help="text, images, video, mixed, or a YAML or JSON file.")
]
_TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="CSV with the columns of the Azure LMM trace, or our access log."
    ),
]
_Attainment = Annotated[
    float, typer.Option(metavar="P", help="Share of the requests that must keep the objectives.")
]
_MinRate = Annotated[
    float | None, typer.Option(metavar="R", help="Requests per second that the plan must serve.")
]
_MinRetention = Annotated[
    float,
    typer.Option(metavar="P", help="Least share of visual tokens to keep; below 1 costs accuracy."),
]
_Threads = Annotated[
    int | None,
    typer.Option(
        "--cpu-threads",
        metavar="N",
        help="Threads that read media; by default 64, or the cores of a profile's machine.",
    ),
]
_Seed = Annotated[int, typer.Option(metavar="N", help="Of the requests that are simulated.")]
_Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the plan here, as YAML.")]
_IsJson = Annotated[bool, typer.Option("--json", help="Print one record instead of text.")]

_RETENTIONS = (1.0, 0.5, 0.25)
_NUM_REQUESTS = 250
# Arrivals are simulated for so many times as long as a request may take.
_HORIZON = 5.0


def plan(
    gpus: _Gpus = 8,
    profile: _Profile = "qwen2.5-vl-7b@a100-80gb",
    workload: _Workload = None,
    trace: _TraceFile = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    attainment: _Attainment = 0.9,
    min_rate: _MinRate = None,
    min_retention: _MinRetention = 1.0,
    cpu_threads: _Threads = None,
    seed: _Seed = 0,
    out: _Out = None,
    as_json: _IsJson = False,
) -> None:
    """Search for the topology with the highest goodput per device.

    Says when not to disaggregate, and what binds when nothing will do (exit code 3).
    """
    from epd.planning.plan import make_plan
    from epd.planning.space import cells_of
    from epd.profiles import load_profile

    _check(slo_ttft, slo_tpot, attainment, min_retention, cpu_threads, out)
    loaded = load_profile(profile)
    config = workload_config(workload, None, None, trace, None, loaded.media)
    retentions = tuple(share for share in _RETENTIONS if share >= min_retention)
    num_cells, per_cell = cells_of(gpus)
    threads = num_threads(cpu_threads, loaded, 64)
    planner = _planner(per_cell, loaded, config, (slo_ttft, slo_tpot, attainment), retentions, threads, seed)
    with console.progress_bar("layouts") as show:
        found = make_plan(planner, num_cells=num_cells, min_rate=min_rate, on_progress=show)
    if as_json:
        console.print_json(found.record())
    else:
        _print(found)
    if out is not None:
        import yaml  # type: ignore[import-untyped]  # its stubs are another package

        out.write_text(yaml.safe_dump(found.record(), sort_keys=False), encoding="utf-8")


def _check(
    slo_ttft: float | None,
    slo_tpot: float | None,
    attainment: float,
    min_retention: float,
    cpu_threads: int | None,
    out: Path | None,
) -> None:
    if slo_ttft is None and slo_tpot is None:
        raise RequestError(
            "no objective is given, so no rate would be too high; add --slo-ttft-s or --slo-tpot-s"
        )
    for name, share in (("attainment", attainment), ("min retention", min_retention)):
        if not 0 < share <= 1:
            raise RequestError(f"{name} is {share}, it must be above 0 and at most 1")
    if cpu_threads is not None and cpu_threads < 1:
        raise RequestError(f"cpu threads are {cpu_threads}, there must be at least 1")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise RequestError(f"cannot write {str(out)!r}; give a file name in a folder that exists")


def _planner(
    gpus: int,
    profile: Profile,
    config: WorkloadConfig,
    objectives: tuple[float | None, float | None, float],
    retentions: tuple[float, ...],
    cpu_threads: int,
    seed: int,
) -> Planner:
    from epd.planning.goodput import Demand
    from epd.planning.search import Planner
    from epd.planning.space import Space
    from epd.simulate import Deployment, JobMaker
    from epd.topology import parse_topology
    from epd.workload.metrics import SLO

    fields = {
        "num_requests": _NUM_REQUESTS,
        "duration_s": None,
        "rate": config.rate or 1.0,
        "repeat_rate": 0.0,
    }
    requests = config.model_copy(update=fields).resolve().requests(seed)
    ttft_s, tpot_s, attainment = objectives
    jobs = list(JobMaker(profile).jobs(requests))
    longest_s = (ttft_s or 1.0) + (tpot_s or 0.05) * max(job.output_tokens for job in jobs)
    demand = Demand.of(jobs, SLO(ttft_s, tpot_s), attainment, _HORIZON * longest_s)
    base = Deployment(parse_topology("1epd"), cpu_threads=cpu_threads)
    return Planner(profile, demand, Space(gpus, retentions=retentions), base)


def _print(found: Plan) -> None:
    """The answer first, then what it rests on."""
    out, winner = console.stdout_console(), found.winner
    cells = f" ({found.num_cells} cells of {winner.candidate.topology})" if found.num_cells > 1 else ""
    out.print(f"run {found.topology}{cells}: {winner.candidate.settings}")
    out.print(f"  {found.goodput:.3g} requests/s within the objectives, {winner.per_device:.3g} per device")
    if found.cost_per_thousand is not None:
        price = found.profile.price_per_hour
        out.print(f"  {found.cost_per_thousand:.3g} per thousand requests, at {price:g} per device and hour")
    out.print(found.verdict)
    if found.search.runner_up is not None:
        loser = found.search.runner_up
        out.print(f"second: {loser.candidate.topology} with {loser.goodput:.3g} requests/s; {found.reason}")
    if found.search.encoder_scaling:
        steps = ", ".join(f"{count}: {value:.3g}" for count, value in found.search.encoder_scaling)
        out.print(f"requests/s by number of encoders, all else as it is: {steps}")
    out.print(
        f"{found.search.num_candidates} candidates, {found.search.num_simulated} simulated; what was assumed:"
    )
    for line in found.assumptions:
        out.print(f"  {line}")
