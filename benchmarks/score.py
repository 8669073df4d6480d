"""The public score: what the simulator predicts against what the application does, pair by pair.

    make score        python -m benchmarks.score [--pairs 0:10] [--folder FOLDER] [--fresh]

A pair is a layout, a workload and a share of visual tokens that is kept. Every pair gets the same requests
live and in the simulator, as in `benchmarks/planner.py`. The profile is measured in turns with the live runs,
since cores change within minutes:

    stages | round of the profile | two layouts live | round | two layouts live | round

A round asks the application other requests (`KINDS`, in `LAYOUTS`, with other seeds). The profile knows the
stages and all three rounds, and no figure of a live run: of these are used the requests, and the speed of the
cores meanwhile, by a small loop that the client times. Rates of live runs follow from the first round. Both
encode beside the other stages of a worker, the default of `epd serve`.
What is done is kept in FOLDER, so a run goes on where it was stopped, and --pairs does a part. When all pairs
are there, results go to benchmarks/results/score.{json,md}, with one more entry in the history of dates. The
machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from benchmarks.planner import (
    EPD,
    NUM_KV_TOKENS,
    SEED,
    TOPOLOGIES,
    WORKLOADS,
    deployment_of,
    rate_of,
    seed_of,
    workload_at,
)
from benchmarks.reporting import RESULTS, Row, setting, table
from epd.bench.app_profile import AppRound, app_round, fitted
from epd.bench.live_app import live_app
from epd.bench.media import MediaLibrary
from epd.models import embedded_model_path
from epd.profiles import Profile
from epd.profiles.app_costs import Figures
from epd.profiles.files import load_profile
from epd.simulate.calibrating import simulated_figures
from video.demo_video import write_scene

NUM_REQUESTS, LOAD = 30, 0.5
AIM_MEDIAN, AIM_P90 = 0.10, 0.25
FIGURES = {"TTFT": "ttft_s", "TPOT": "tpot_s"}


@dataclass(frozen=True, slots=True)
class Case:
    """Names a pair."""

    topology: str
    workload: str
    retention: float


@dataclass(frozen=True, slots=True)
class Found:
    """Holds one figure of a pair, seconds. steady_s: simulated as if the cores kept the profile's speed."""

    case: Case
    figure: str
    live_s: float
    simulated_s: float
    steady_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.live_s - 1

    @property
    def steady_error(self) -> float:
        return self.steady_s / self.live_s - 1


CASES = tuple(
    Case(topology, workload, retention)
    for topology in TOPOLOGIES
    for workload, retention in [*((name, 1.0) for name in WORKLOADS), ("video of 4 to 8 s", 0.5)]
)


def score_of(errors: Sequence[float]) -> Row:
    """Returns how far relative errors are from 0, and on which side. Raises ValueError without any."""
    if not errors:
        raise ValueError("0 errors have no score; measure at least one pair")
    sizes = np.abs(errors)
    median, p90 = np.percentile(sizes, (50, 90))
    found = {"mean": sizes.mean(), "median": median, "p90": p90, "bias": np.mean(errors)}
    return {name: round(float(value), 4) for name, value in found.items()}


def scores_of(found: Sequence[Found]) -> dict[str, Row]:
    """Returns the scores of each figure, of both together, and of both where the speed is not known."""
    by_figure = {name: [each.error for each in found if each.figure == name] for name in FIGURES}
    together = {"both": [each.error for each in found], "steady": [each.steady_error for each in found]}
    return {name: score_of(errors) for name, errors in (by_figure | together).items()}


def is_met(score: Row) -> bool:
    return bool(score["median"] <= AIM_MEDIAN and score["p90"] <= AIM_P90)


def with_entry(history: Sequence[Row], entry: Row) -> list[Row]:
    """Returns the history with one more entry: none is changed, and dates never go back."""
    if history and entry["date"] < history[-1]["date"]:
        raise ValueError(
            f"an entry of {entry['date']} cannot follow one of {history[-1]['date']}; check the clock"
        )
    return [*history, entry]


# Measuring


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Holds what the application did with the requests of a pair. core_speed: meanwhile."""

    case: Case
    rate: float
    figures: Figures
    core_speed: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds what is measured so far: rounds of the profile, and live runs."""

    rounds: tuple[AppRound, ...] = ()
    runs: tuple[LiveRun, ...] = ()


class Run:
    """Keeps what is measured in a folder, after each step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stages = folder / "stages.json"
        self._measured = folder / "measured.json"
        self._type = TypeAdapter(Measured)

    def clear(self) -> None:
        self._stages.unlink(missing_ok=True)
        self._measured.unlink(missing_ok=True)

    def stages(self) -> Profile:
        """Returns the profile without the application."""
        if not self._stages.exists():
            command = [str(EPD), "profile", "--repeats", "9", "--out", str(self._stages)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return load_profile(str(self._stages))

    def measured(self) -> Measured:
        if not self._measured.exists():
            return Measured()
        return self._type.validate_json(self._measured.read_bytes())

    def add(self, *, rounds: Sequence[AppRound] = (), runs: Sequence[LiveRun] = ()) -> None:
        now = self.measured()
        now = Measured((*now.rounds, *rounds), (*now.runs, *runs))
        self._measured.write_bytes(self._type.dump_json(now, indent=1))


def measure(run: Run, cases: Sequence[Case]) -> None:
    """Measures what is not there yet: before each second layout, and at last, a round of the profile."""
    stages = run.stages()
    first = None
    for number, topology in enumerate(TOPOLOGIES):
        done = {each.case for each in run.measured().runs}
        left = [case for case in cases if case.topology == topology and case not in done]
        if left and number % 2 == 0:
            _add_round(run, stages, number // 2)
        if left:
            first = first or fitted(stages, run.measured().rounds[:1])
            measure_layout(run, first, topology, left)
    if {each.case for each in run.measured().runs} == set(CASES):
        _add_round(run, stages, len(TOPOLOGIES) // 2)


def _add_round(run: Run, stages: Profile, number: int) -> None:
    if len(run.measured().rounds) <= number:
        print(f"round {number + 1} of the profile", file=sys.stderr, flush=True)
        run.add(rounds=[app_round(stages, embedded_model_path(), write_scene, numbers=[number])])


def measure_layout(run: Run, profile: Profile, topology: str, cases: Sequence[Case]) -> None:
    """Sends the requests of pairs of one layout. profile: for their rates."""
    with tempfile.TemporaryDirectory(prefix="epd-score-") as folder:
        library = MediaLibrary(Path(folder) / "media", write_scene)
        options = ["--topology", topology, "--num-threads", str(profile.num_threads or 1)]
        options += ["--num-kv-tokens", str(NUM_KV_TOKENS)]
        with live_app(options, Path(folder) / "serve.log") as app:
            for part in WORKLOADS.values():
                app.send(workload_at(part, 4, 2.0), library, seed=SEED - 1)
            for case in cases:
                rate = rate_of(profile, topology, WORKLOADS[case.workload], LOAD)
                extra = {} if case.retention == 1 else {"epd": {"retention": case.retention}}
                workload = workload_at(WORKLOADS[case.workload], NUM_REQUESTS, rate)
                result = app.send(workload, library, seed=_seed(case), extra=extra)
                run.add(runs=[LiveRun(case, rate, result.figures(0.0), result.core_speed)])


def _seed(case: Case) -> int:
    """Returns the seed of a pair's requests: no two of a layout have the same media."""
    return seed_of(case.workload, round(10 * (1 - case.retention)))


def compared(profile: Profile, live: LiveRun) -> list[Found]:
    """Simulates the requests of a live run."""
    case, deployment = live.case, deployment_of(live.case.topology)
    workload = workload_at(WORKLOADS[case.workload], NUM_REQUESTS, live.rate)
    simulated, steady = (
        simulated_figures(each, deployment, workload, _seed(case), retention=case.retention)
        for each in (profile.at_speed(live.core_speed), profile)
    )
    return [
        Found(case, figure, getattr(live.figures, name), getattr(simulated, name), getattr(steady, name))
        for figure, name in FIGURES.items()
    ]


def found_of(run: Run) -> list[Found]:
    """Fits the profile to all rounds, and simulates all live runs with it."""
    measured = run.measured()
    if not measured.runs:
        return []
    profile = fitted(run.stages(), measured.rounds)
    return [each for live in measured.runs for each in compared(profile, live)]


# Results


def written(found: Sequence[Found], folder: Path, here: Row) -> None:
    """Writes score.{json,md}, with one more entry in the history."""
    path, scores = folder / "score.json", scores_of(found)
    history = json.loads(path.read_text(encoding="utf-8"))["history"] if path.exists() else []
    entry: Row = {"date": here["date"][:10], "pairs": len({each.case for each in found}), **scores}
    results = {
        "setting": here,
        "history": with_entry(history, entry),
        "pairs": [asdict(each) for each in found],
    }
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(as_markdown(found, results["history"], here), encoding="utf-8")


def as_markdown(found: Sequence[Found], history: Sequence[Row], here: Row) -> str:
    both = scores_of(found)["both"]
    lines = ["# What the simulator predicts against the application", "", "`make score`", ""]
    lines += [f"- {key}: {value}" for key, value in here.items()]
    verdict = "met" if is_met(both) else "missed"
    lines += ["", f"Aim: median {AIM_MEDIAN:.0%}, 90th percentile {AIM_P90:.0%} of TTFT and TPOT: {verdict}."]
    lines += ["", "## History", "", table([row for entry in history for row in _history_rows(entry)])]
    lines += ["", "## Pairs", "", table([_pair_row(found, case) for case in CASES if _of(found, case)])]
    return "\n".join(lines) + "\n"


def _history_rows(entry: Row) -> list[Row]:
    names = {"TTFT": "TTFT", "TPOT": "TPOT", "both": "both", "steady": "both, at the profile's speed"}
    shown = {"median": "median error", "p90": "90th percentile", "mean": "mean error", "bias": "mean, signed"}
    return [
        {"date": entry["date"], "pairs": entry["pairs"], "figure": names[name]}
        | {head: _share(entry[name].get(key), signed=key == "bias") for key, head in shown.items()}
        for name in names
        if name in entry
    ]


def _share(value: float | None, *, signed: bool = False) -> str:
    return "not kept" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"


def _of(found: Sequence[Found], case: Case) -> list[Found]:
    return [each for each in found if each.case == case]


def _pair_row(found: Sequence[Found], case: Case) -> Row:
    row: Row = asdict(case)
    for each in _of(found, case):
        row[f"{each.figure} live, ms"] = round(1e3 * each.live_s, 1)
        row[f"{each.figure} simulated, ms"] = round(1e3 * each.simulated_s, 1)
        row[f"{each.figure} error"] = f"{each.error:+.0%}"
    return row


def _range(text: str) -> slice:
    first, _, last = text.partition(":")
    return slice(int(first), int(last))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=_range, default=slice(0, len(CASES)), metavar="FIRST:STOP")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "epd-score")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run has measured")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the application is ended on the way
    run = Run(args.folder)
    if args.fresh:
        run.clear()
    measure(run, CASES[args.pairs])
    found = found_of(run)
    print(json.dumps(scores_of(found), indent=1) if found else "the profile is measured")
    if {each.case for each in found} == set(CASES):
        conditions: Row = {
            "load": LOAD,
            "requests": NUM_REQUESTS,
            "merged workers": "encode beside their passes",
        }
        here = setting(("ray", "torch"), checkpoint="shapes-vl, float32", **conditions)
        written(found, RESULTS, here)
        run.clear()


if __name__ == "__main__":
    main()
