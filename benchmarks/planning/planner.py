"""What `epd simulate` predicts against what the application does, with the same requests on this machine.

    python -m benchmarks.planning.planner [--quick] [--rounds N] [--profile FILE] [--profiles FOLDER]
                                       [--load SHARE] [--topologies 1epd,1e1p1d] [--workloads text,image]

First `app_profile.py` measures the stages of the embedded model, each alone, and what the application
costs beside them: questions at random times, of two layouts. Then for each layout and workload requests
arrive at random times, at a rate that keeps SHARE of the cores busy (by the simulation), at `epd serve`; and
in the simulator with that profile. Nothing is fitted to these runs. All of this is done in rounds, so that
a machine that is slow for a while spoils a part of each pair, not all of one. Figures are medians over
the requests of a round, which others on the machine move less than means, and of these the mean over the
rounds; error: of the simulated one. encode, prefill: work of these stages for one request, as the
application's log has it.
Cores of a rented machine do not keep their speed: the same work takes up to half as long again when strangers
use the other half of a core. So a small piece of work is timed all along, with the profile and with each run,
and requests are simulated at the speed that the cores had then. The error without that is told too.
Results go to benchmarks/results/planner.{json,md}, and profiles beside them; of a part of the pairs, nowhere.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from benchmarks.score.app_costs import Figures
from benchmarks.score.calibrating import simulated_figures
from benchmarks.score.live_app import LiveApp, live_app
from benchmarks.score.shared_cores import HostedProfile, read_profile
from benchmarks.score.speed import at_speed
from epd.bench.media import MediaLibrary
from epd.machine import usable_cpus
from epd.simulate import Deployment
from epd.topology import parse_topology
from epd.video.demo_video import write_scene
from epd.workload.config import load_workload
from epd.workload.requests import Workload

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
FIGURES = {"TTFT": "ttft_s", "TPOT": "tpot_s", "encode": "encode_s", "prefill": "prefill_s"}


@dataclass(frozen=True, slots=True)
class Options:
    """is_whole: all pairs, as they are published. profiles: a folder for those that are measured."""

    is_quick: bool
    is_whole: bool
    rounds: int
    requests: int
    load: float
    profile: Path | None
    profiles: Path
    topologies: tuple[str, ...]
    workloads: tuple[str, ...]

    @classmethod
    def parse(cls) -> Options:
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--quick", action="store_true", help="two layouts, one round of few requests")
        parser.add_argument("--rounds", type=int, default=2, help="each with a profile and all pairs")
        parser.add_argument(
            "--profile", type=Path, help="of benchmarks.score.app_profile, instead of measuring them"
        )
        parser.add_argument("--profiles", type=Path, help="a folder for the measured ones")
        parser.add_argument("--load", type=float, default=0.5, help="share of the cores that is kept busy")
        parser.add_argument("--topologies", type=_names, default=TOPOLOGIES, metavar="NAME,NAME")
        parser.add_argument("--workloads", type=_names, default=tuple(WORKLOADS), metavar="NAME,NAME")
        given = parser.parse_args()
        if unknown := set(given.workloads) - set(WORKLOADS):
            parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
        is_whole = not given.quick and (given.topologies, given.workloads) == (TOPOLOGIES, tuple(WORKLOADS))
        topologies = (
            ("1epd", "1e1p1d") if given.quick and given.topologies == TOPOLOGIES else given.topologies
        )
        return cls(
            is_quick=given.quick,
            is_whole=is_whole,
            rounds=1 if given.quick else given.rounds,
            requests=20 if given.quick else 60 // given.rounds,
            load=given.load,
            profile=given.profile,
            profiles=given.profiles or (RESULTS if is_whole else Path(tempfile.gettempdir())),
            topologies=topologies,
            workloads=given.workloads,
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure of one layout and workload, seconds. steady_s: simulated as if cores kept their speed."""

    live_s: float
    simulated_s: float
    steady_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.live_s - 1

    @property
    def steady_error(self) -> float:
        return self.steady_s / self.live_s - 1


@dataclass(frozen=True, slots=True)
class Round:
    """The same requests, live and simulated. slowness: how many times as long the cores took for work."""

    live: Figures
    simulated: Figures
    steady: Figures
    slowness: float


def workload_at(part: Row, num_requests: int, rate: float) -> Workload:
    return load_workload(None, {"rate": rate, "num_requests": num_requests, "mix": [part]}).resolve()


def seed_of(name: str, number: int) -> int:
    """Of a workload in a round. With one seed for two, the first images of both would be the same files."""
    return SEED + len(WORKLOADS) * number + list(WORKLOADS).index(name)


def deployment_of(topology: str) -> Deployment:
    return Deployment(parse_topology(topology), cpu_threads=usable_cpus(), kv_tokens=NUM_KV_TOKENS)


def core_seconds(profile: HostedProfile, topology: str, part: Row) -> float:
    """Of one request, by a simulation in which nobody meets anybody."""
    return simulated_figures(profile, deployment_of(topology), workload_at(part, 20, 0.1), SEED).cpu_s


def rate_of(profile: HostedProfile, topology: str, part: Row, load: float) -> float:
    """Requests per second that keep this share of the cores busy."""
    free = profile.host.num_cores - profile.host.idle_cores
    return load * free / core_seconds(profile, topology, part)


def compare(
    profile: HostedProfile,
    app: LiveApp,
    topology: str,
    name: str,
    library: MediaLibrary,
    options: Options,
    seed: int,
) -> Round:
    """One round of a pair."""
    part = WORKLOADS[name]
    rate = rate_of(profile, topology, part, options.load)
    workload = workload_at(part, options.requests, rate)
    result = app.send(workload, library, seed=seed)
    assert profile.core_speed is not None
    found = Round(
        result.figures(0.0),
        simulated_figures(at_speed(profile, result.core_speed), deployment_of(topology), workload, seed),
        simulated_figures(profile, deployment_of(topology), workload, seed),
        profile.core_speed / result.core_speed,
    )
    shown = ", ".join(
        f"{n} {1e3 * p.live_s:.1f} / {1e3 * p.simulated_s:.1f}" for n, p in pairs_of([found]).items()
    )
    print(f"{topology}, {name}, {rate:.1f}/s, slowness {found.slowness:.2f}: {shown} ms", file=sys.stderr)
    return found


def pairs_of(rounds: Sequence[Round]) -> dict[str, Pair]:
    """By figure, of those that the application has."""
    pairs = {
        figure: Pair(
            statistics.fmean(getattr(each.live, name) for each in rounds),
            statistics.fmean(getattr(each.simulated, name) for each in rounds),
            statistics.fmean(getattr(each.steady, name) for each in rounds),
        )
        for figure, name in FIGURES.items()
    }
    return {figure: pair for figure, pair in pairs.items() if pair.live_s}


def run_round(
    profile: HostedProfile, options: Options, number: int, rounds: dict[tuple[str, str], list[Round]]
) -> None:
    """All pairs once."""
    with tempfile.TemporaryDirectory(prefix="epd-bench-planner-") as folder:
        library = MediaLibrary(Path(folder) / "media", write_scene)
        for topology in options.topologies:
            serve = ["--topology", topology, "--num-threads", str(profile.num_threads or 1)]
            serve += ["--num-kv-tokens", str(NUM_KV_TOKENS)]
            with live_app(serve, Path(folder) / "serve.log") as app:
                for part in WORKLOADS.values():
                    app.send(workload_at(part, 4, 2.0), library, seed=SEED - 1)
                for name in options.workloads:
                    found = compare(profile, app, topology, name, library, options, seed_of(name, number))
                    rounds.setdefault((topology, name), []).append(found)


def all_pairs(options: Options) -> dict[tuple[str, str], dict[str, Pair]]:
    rounds: dict[tuple[str, str], list[Round]] = {}
    for number in range(options.rounds):
        run_round(measured_profile(options, number), options, number, rounds)
    return {key: pairs_of(each) for key, each in rounds.items()}


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
    found = {figure: [each[figure] for each in pairs.values() if figure in each] for figure in FIGURES}
    found["TTFT and TPOT"] = found["TTFT"] + found["TPOT"]
    return [
        {
            "figure": figure,
            "pairs": len(each),
            "mean absolute error": f"{statistics.fmean(abs(pair.error) for pair in each):.1%}",
            "largest": f"{max(abs(pair.error) for pair in each):.1%}",
            "mean error": f"{statistics.fmean(pair.error for pair in each):+.1%}",
            "mean absolute error if the speed is not known": (
                f"{statistics.fmean(abs(pair.steady_error) for pair in each):.1%}"
            ),
        }
        for figure, each in found.items()
        if each
    ]


def measured_profile(options: Options, number: int) -> HostedProfile:
    if options.profile:
        return read_profile(options.profile)
    options.profiles.mkdir(parents=True, exist_ok=True)
    path = options.profiles / f"planner-profile-{number + 1}.json"
    repeats = "3" if options.is_quick else "9"
    command = [sys.executable, "-m", "benchmarks.score.app_profile", "--repeats", repeats, "--out", str(path)]
    subprocess.run(command, check=True)
    return read_profile(path)


def main() -> None:
    options = Options.parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pairs = all_pairs(options)
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
            ("ray", "torch"),
            checkpoint="shapes-vl, float32",
            load=options.load,
            requests=options.requests,
            rounds=options.rounds,
        ),
        save=options.is_whole,
    )


if __name__ == "__main__":
    main()
