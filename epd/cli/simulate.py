"""The verb `epd simulate`: part of the composition root, see epd/cli/program.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from epd import console
from epd.cli.options import SloTpot, SloTtft
from epd.errors import RequestError

if TYPE_CHECKING:
    from epd.profiles import MediaRule, Profile
    from epd.simulate import Deployment, SimulationResult
    from epd.workload.config import WorkloadConfig

_Scenario = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Published figures: epd-table1, epd-table4, epd-table5, epd-table6, epd-overlap or vllm-blog.",
    ),
]
_Profile = Annotated[
    str,
    typer.Option(metavar="FILE", help="Profile: a file of epd profile, or MODEL@DEVICE to compute one."),
]
_Topology = Annotated[
    str, typer.Option(metavar="T", help="Workers and their roles, such as 2e1p1d, 1ep1d or 8epd.")
]
_Workload = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="text, images, video, mixed, or a YAML or JSON file."),
]
_Rate = Annotated[float | None, typer.Option(metavar="R", help="Requests per second.")]
_NumRequests = Annotated[int | None, typer.Option(metavar="N", help="Requests in all.")]
_TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", help="CSV with the columns of the Azure LMM trace, or our access log."
    ),
]
_RepeatRate = Annotated[
    float | None,
    typer.Option(metavar="P", help="Share of requests about media sent before; turns the caches on."),
]
_Seed = Annotated[int, typer.Option(metavar="N", help="The same seed gives the same run, to the last tick.")]
_Sharding = Annotated[
    str,
    typer.Option(metavar="KIND", help="Of one request's groups: groups (over all encoders), request, local."),
]
_IsWhole = Annotated[
    bool, typer.Option("--whole", help="Stages one after another for each request, nothing overlapped.")
]
_Threads = Annotated[
    int | None,
    typer.Option(
        "--cpu-threads",
        metavar="N",
        help="Threads that read media; by default 16, or the cores of a profile's machine.",
    ),
]
_IsJson = Annotated[bool, typer.Option("--json", help="Print records instead of tables.")]
_ChromeFile = Annotated[
    Path | None,
    typer.Option("--chrome-trace", metavar="FILE", help="Write what every worker did, for chrome://tracing."),
]
_PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw: png, svg or pdf.")]

# A simulated fleet may be larger than one that epd serve starts.
_MAX_WORKERS = 4096


def simulate(
    scenario: _Scenario = None,
    profile: _Profile = "qwen2.5-vl-7b@a100-80gb",
    topology: _Topology = "2e1p1d",
    workload: _Workload = None,
    rate: _Rate = None,
    num_requests: _NumRequests = None,
    trace: _TraceFile = None,
    repeat_rate: _RepeatRate = None,
    seed: _Seed = 0,
    sharding: _Sharding = "groups",
    whole: _IsWhole = False,
    cpu_threads: _Threads = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    as_json: _IsJson = False,
    chrome_trace: _ChromeFile = None,
    plot: _PlotFile = None,
) -> None:
    """Simulate a fleet, or repeat published figures.

    With --scenario: simulated beside published. Otherwise requests of a workload on a topology.
    """
    from epd.profiles import load_profile

    _check_outputs(chrome_trace, plot)
    if scenario is not None:
        _show_scenario(scenario, as_json, plot)
        return
    loaded = load_profile(profile)
    config = workload_config(workload, rate, num_requests, trace, repeat_rate, loaded.media)
    threads = num_threads(cpu_threads, loaded, 16)
    deployment = _deployment(topology, sharding, whole, threads, has_repeats=config.repeat_rate > 0)
    result = _run(loaded, deployment, config, seed, has_spans=chrome_trace is not None)
    _show_result(result, slo_ttft, slo_tpot, as_json)
    if chrome_trace is not None:
        from epd.simulate.chrome import chrome_trace as dump

        chrome_trace.write_text(dump(result), encoding="utf-8")
    if plot is not None:
        from epd.simulate.plots import plot_simulation

        plot_simulation(result, plot)


def _check_outputs(chrome_trace: Path | None, plot: Path | None) -> None:
    """Refuses files that cannot be written before anything is simulated."""
    from epd.bench.plots import check_plot_path

    if plot is not None:
        check_plot_path(plot)
    if chrome_trace is not None and (chrome_trace.is_dir() or not chrome_trace.parent.is_dir()):
        raise RequestError(f"cannot write {str(chrome_trace)!r}; give a file name in a folder that exists")


def _show_scenario(name: str, as_json: bool, plot: Path | None) -> None:
    from epd.published.scenarios import run_scenario
    from epd.simulate.report import print_rows

    with console.status(f"simulating {name}"):
        rows = run_scenario(name)
    if as_json:
        console.print_json([row.record() for row in rows])
    else:
        print_rows(rows, console.stdout_console())
    if plot is not None:
        from epd.simulate.plots import plot_rows

        plot_rows(rows, plot)


def num_threads(given: int | None, profile: Profile, default: int) -> int:
    """Threads that read media: as told, or the cores of the profile's machine, or `default`."""
    if given is not None:
        return given
    return default if profile.host is None else profile.host.num_cores


def workload_config(
    source: str | None,
    rate: float | None,
    num_requests: int | None,
    trace: Path | None,
    repeat_rate: float | None,
    media: MediaRule,
) -> WorkloadConfig:
    """A preset or a file, with what was given on the command line. media: of the model."""
    from epd.workload.config import load_workload

    options = {
        "rate": rate,
        "num_requests": num_requests,
        "trace": trace,
        "repeat_rate": repeat_rate,
        "token_side": media.patch * media.merge,
        "frames_per_s": media.video_fps,
    }
    fields = {name: value for name, value in options.items() if value is not None}
    return load_workload(source or (None if trace else "images"), fields)


def _deployment(
    topology: str, sharding: str, whole: bool, cpu_threads: int, *, has_repeats: bool
) -> Deployment:
    from epd.simulate import Deployment
    from epd.topology import parse_topology

    if sharding not in ("groups", "request", "local"):
        raise RequestError(f"sharding is {sharding!r}, it must be groups, request or local")
    if cpu_threads < 1:
        raise RequestError(f"cpu threads are {cpu_threads}, there must be at least 1")
    parsed = parse_topology(topology, _MAX_WORKERS)
    if sharding == "local" and not all("encode" in g.roles for g in parsed.groups if "prefill" in g.roles):
        raise RequestError(
            f"sharding local encodes where it is prefilled, which {topology} cannot; try ep or epd workers"
        )
    return Deployment(
        parsed,
        sharding=sharding,  # type: ignore[arg-type]  # checked above
        is_overlapped=not whole,
        cpu_threads=cpu_threads,
        enable_prefix_caching=has_repeats,
    )


def _run(
    profile: Profile, deployment: Deployment, config: WorkloadConfig, seed: int, *, has_spans: bool
) -> SimulationResult:
    from epd.simulate import JobMaker, Simulation

    simulation = Simulation(profile, deployment, has_spans=has_spans)
    workload = config.resolve()
    if not workload.is_open_loop:
        raise RequestError(
            "a closed loop has no times of arrival to simulate; give --rate and another arrival"
        )
    jobs = JobMaker(profile).jobs(workload.requests(seed))
    with console.progress_bar("requests") as show:
        num = config.num_requests
        return simulation.run(jobs, None if num is None else lambda done: show(done, num))


def _show_result(
    result: SimulationResult, slo_ttft: float | None, slo_tpot: float | None, as_json: bool
) -> None:
    from epd.simulate.report import print_result, result_record
    from epd.workload.metrics import SLO

    slo = SLO(slo_ttft, slo_tpot)
    if as_json:
        console.print_json(result_record(result, slo))
    else:
        print_result(result, slo, console.stdout_console())
