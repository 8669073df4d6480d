"""The public score: what the simulator predicts against what the application does, pair by pair.

    make score        python -m benchmarks.score [--pairs 0:10] [--folder FOLDER] [--fresh]

A pair is a layout, a workload and a share of visual tokens that is kept. Every pair gets the same requests
live and in the simulator, as in `planner.py`; `measuring.py` says in which order
they and the profile are measured. shapes-vl hears nothing, so clips of sound go to a second application, with
a checkpoint of about its size (`benchmarks/score/hearing_checkpoint.py`) and a profile of its own.
What is done is kept in FOLDER, so a run goes on where it was stopped, and --pairs does a part. When all pairs
are there, results go to benchmarks/results/score.{json,md}, with one more entry in the history of dates. The
machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.planning.planner import deployment_of, workload_at
from benchmarks.reporting import RESULTS, Row, setting, table
from benchmarks.score.app_profile import fitted
from benchmarks.score.calibrating import simulated_figures
from benchmarks.score.measuring import (
    CASES,
    LOAD,
    NUM_REQUESTS,
    SENSES,
    Case,
    LiveRun,
    Run,
    measure,
    sense_of,
)
from benchmarks.score.shared_cores import HostedProfile
from benchmarks.score.speed import at_speed

AIM_MEDIAN, AIM_P90 = 0.10, 0.25
FIGURES = {"TTFT": "ttft_s", "TPOT": "tpot_s"}


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


def compared(profile: HostedProfile, live: LiveRun) -> list[Found]:
    """Simulates the requests of a live run."""
    case, sense, deployment = live.case, sense_of(live.case), deployment_of(live.case.topology)
    workload = workload_at(sense.workloads[case.workload], NUM_REQUESTS, live.rate)
    simulated, steady = (
        simulated_figures(each, deployment, workload, sense.seed(case), retention=case.retention)
        for each in (at_speed(profile, live.core_speed), profile)
    )
    return [
        Found(case, figure, getattr(live.figures, name), getattr(simulated, name), getattr(steady, name))
        for figure, name in FIGURES.items()
    ]


def found_of(run: Run) -> list[Found]:
    """Fits the profiles to all rounds, and simulates all live runs with them."""
    measured = run.measured()
    runs = {name: [each for each in measured.runs if sense_of(each.case).name == name] for name in SENSES}
    profiles = {
        name: fitted(run.stages(SENSES[name]), measured.rounds[name]) for name, some in runs.items() if some
    }
    return [each for live in measured.runs for each in compared(profiles[sense_of(live.case).name], live)]


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
        checkpoint = "shapes-vl, float32; for sound a random one of about its size"
        here = setting(("ray", "torch"), checkpoint=checkpoint, **conditions)
        written(found, RESULTS, here)
        run.clear()


if __name__ == "__main__":
    main()
