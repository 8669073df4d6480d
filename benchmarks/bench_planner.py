"""What `epd simulate` predicts against what the application does, with the same requests on this machine.

    python benchmarks/bench_planner.py [--quick] [--profile FILE] [--load SHARE]

First `epd profile --app` measures the stages of the embedded model, each alone, and what the application
costs beside them: questions asked one after the other, of two layouts. Then for each layout and workload
requests arrive at random times, at a rate that keeps SHARE of the cores busy (by the simulation), at
`epd serve`; and in the simulator with that profile. Nothing is fitted to these runs. Figures are medians over
the requests, which others on the machine move less than means; error: of the simulated one. encode, prefill:
work of these stages for one request, as the application's log has it.
Results go to benchmarks/results/planner.{json,md}.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import os  # noqa: E402 - after sys.path
import statistics  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402

from reporting import Row, Section, run_sections, setting  # noqa: E402

from epd.cli_bench import _write_video  # noqa: E402
from epd.load.live_app import LiveApp, LoadResult, live_app  # noqa: E402
from epd.load.media import MediaLibrary  # noqa: E402
from epd.profiles import Profile, load_profile  # noqa: E402
from epd.simulate import Deployment, JobMaker, Simulation, SimulationResult  # noqa: E402
from epd.simulate.clock import TICKS_PER_S  # noqa: E402
from epd.topology import parse_topology  # noqa: E402
from epd.workload import Workload  # noqa: E402
from epd.workload_config import load_workload  # noqa: E402

EPD = Path(sys.executable).with_name("epd")
TOPOLOGIES = ("1epd", "1ep1d", "1e1pd", "1e1p1d")
WORKLOADS: Mapping[str, Row] = {
    "text": {"text_tokens": "24..64", "output_tokens": "12..20"},
    "image": {"images": 1, "image_size": "224x224", "text_tokens": "16..32", "output_tokens": "8..16"},
    "2 to 4 images": {"images": "2..4", "image_size": "224x224", "text_tokens": "16..32", "output_tokens": 8},
    "video of 4 to 8 s": {
        "videos": 1,
        "video_s": "4..8",
        "video_size": "320x192",
        "text_tokens": "16..32",
        "output_tokens": 8,
    },
}
NUM_KV_TOKENS = 32_768
SEED = 11
FIGURES = ("TTFT", "TPOT", "encode", "prefill")


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure of one layout and workload, seconds."""

    live_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.live_s - 1


def workload_at(part: Row, num_requests: int, rate: float) -> Workload:
    return load_workload(None, {"rate": rate, "num_requests": num_requests, "mix": [part]}).resolve()


def simulation_of(profile: Profile, topology: str) -> Simulation:
    cores = os.cpu_count() or 1
    return Simulation(
        profile, Deployment(parse_topology(topology), cpu_threads=cores, kv_tokens=NUM_KV_TOKENS)
    )


def simulated(profile: Profile, topology: str, workload: Workload) -> SimulationResult:
    jobs = JobMaker(profile).jobs(workload.requests(SEED))
    return simulation_of(profile, topology).run(jobs)


def core_seconds(profile: Profile, topology: str, part: Row) -> float:
    """Of one request, by a simulation in which nobody meets anybody."""
    workload = workload_at(part, 20, 0.1)
    simulation = simulation_of(profile, topology)
    simulation.run(JobMaker(profile).jobs(workload.requests(SEED)))
    return simulation.work_s / 20


def rate_of(profile: Profile, topology: str, part: Row, load: float) -> float:
    """Requests per second that keep this share of the cores busy."""
    host = profile.host
    assert host is not None
    free = host.num_cores - host.idle_cores
    return load * free / core_seconds(profile, topology, part)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def live_figures(result: LoadResult) -> dict[str, float]:
    records = [record for record in result.records if record.error is None]
    found = {
        "TTFT": median([record.token_times_s[0] - record.sent_s for record in records]),
        "TPOT": median(
            [
                (record.end_s - record.token_times_s[0]) / (record.completion_tokens - 1)
                for record in records
                if (record.completion_tokens or 0) > 1
            ]
        ),
    }
    return found | {
        stage: median([each.stages_s.get(stage, 0.0) for each in result.served])
        for stage in ("encode", "prefill")
    }


def simulated_figures(result: SimulationResult) -> dict[str, float]:
    return {
        "TTFT": median(result.ttft_s.tolist()),
        "TPOT": median(result.tpot_s.tolist()),
        "encode": median(result.rows["encode_ticks"].tolist()) / TICKS_PER_S,
        "prefill": median(result.rows["prefill_ticks"].tolist()) / TICKS_PER_S,
    }


def compare(
    profile: Profile,
    app: LiveApp,
    topology: str,
    name: str,
    library: MediaLibrary,
    options: argparse.Namespace,
) -> dict[str, Pair]:
    part = WORKLOADS[name]
    rate = rate_of(profile, topology, part, options.load)
    workload = workload_at(part, options.requests, rate)
    live = live_figures(app.load(workload, library, seed=SEED))
    found = simulated_figures(simulated(profile, topology, workload))
    pairs = {figure: Pair(live[figure], found[figure]) for figure in FIGURES if live[figure]}
    shown = ", ".join(f"{n} {1e3 * p.live_s:.1f} / {1e3 * p.simulated_s:.1f}" for n, p in pairs.items())
    print(f"{topology}, {name}, {rate:.1f}/s, load {os.getloadavg()[0]:.1f}: {shown} ms", file=sys.stderr)
    return pairs


def all_pairs(profile: Profile, options: argparse.Namespace) -> dict[tuple[str, str], dict[str, Pair]]:
    found = {}
    with tempfile.TemporaryDirectory(prefix="epd-bench-planner-") as folder:
        library = MediaLibrary(Path(folder) / "media", _write_video)
        for topology in options.topologies:
            serve = ["--topology", topology, "--num-threads", str(profile.num_threads or 1)]
            serve += ["--num-kv-tokens", str(NUM_KV_TOKENS)]
            with live_app(serve, Path(folder) / "serve.log") as app:
                for part in WORKLOADS.values():
                    app.load(workload_at(part, 4, 2.0), library, seed=SEED + 1)
                for name in options.workloads:
                    found[topology, name] = compare(profile, app, topology, name, library, options)
    return found


def rows_of(pairs: Mapping[tuple[str, str], Mapping[str, Pair]]) -> list[Row]:
    rows: list[Row] = []
    for (topology, name), figures in pairs.items():
        row: Row = {"topology": topology, "workload": name}
        for figure in FIGURES:
            pair = figures.get(figure)
            row[f"{figure} live, ms"] = "-" if pair is None else round(1e3 * pair.live_s, 1)
            row[f"{figure} simulated, ms"] = "-" if pair is None else round(1e3 * pair.simulated_s, 1)
            row[f"{figure} error"] = "-" if pair is None else f"{pair.error:+.0%}"
        rows.append(row)
    return rows


def summary_of(pairs: Mapping[tuple[str, str], Mapping[str, Pair]]) -> list[Row]:
    """Mean absolute errors, of each figure and of TTFT and TPOT together."""
    errors = {
        figure: [abs(each[figure].error) for each in pairs.values() if figure in each] for figure in FIGURES
    }
    errors["TTFT and TPOT"] = errors["TTFT"] + errors["TPOT"]
    return [
        {
            "figure": figure,
            "pairs": len(values),
            "mean absolute error": f"{statistics.fmean(values):.1%}",
            "largest": f"{max(values):.1%}",
        }
        for figure, values in errors.items()
        if values
    ]


def measured_profile(options: argparse.Namespace) -> Profile:
    if options.profile:
        return load_profile(str(options.profile))
    with tempfile.TemporaryDirectory(prefix="epd-bench-planner-") as folder:
        path = Path(folder) / "profile.json"
        repeats = "3" if options.quick else "9"
        subprocess.run([str(EPD), "profile", "--app", "--repeats", repeats, "--out", str(path)], check=True)
        return load_profile(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two layouts, few requests; writes nothing")
    parser.add_argument("--profile", type=Path, help="of epd profile --app, instead of measuring one")
    parser.add_argument("--load", type=float, default=0.5, help="share of the cores that is kept busy")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.requests = 20 if options.quick else 60
    options.topologies = ("1epd", "1e1p1d") if options.quick else TOPOLOGIES
    options.workloads = tuple(WORKLOADS)
    profile = measured_profile(options)
    pairs = all_pairs(profile, options)
    sections = {
        "summary": Section("Mean absolute errors (aim: at most 15 %)", lambda: summary_of(pairs)),
        "pairs": Section("Medians of each layout and workload", lambda: rows_of(pairs)),
    }
    run_sections(
        "planner",
        "The simulator against the application",
        sections,
        list(sections),
        lambda: setting(
            ("ray", "torch"), checkpoint="shapes-vl, float32", load=options.load, requests=options.requests
        ),
        save=not options.quick,
    )


if __name__ == "__main__":
    main()
