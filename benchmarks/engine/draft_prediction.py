"""What drafts save: the simulator beside `epd serve --local`, the same requests.

    python -m benchmarks.engine.draft_prediction [--profile FILE]

FILE: of `python -m benchmarks.score.app_profile`, which else is measured first.

Answers of 120 tokens, beyond where the model would end: greedy ones, which repeat themselves, and drawn ones
with penalties, which do less. How often a drafted token holds is measured with other questions, of which each
has the server for itself, with `--draft prompt-lookup` on one worker. With that acceptance the simulator
predicts `--draft auto` at random times, in two layouts: tokens of a decode pass, by the server's counters,
and TPOT with and without drafts. Each should be within TOLERANCE.
Results go to benchmarks/results/draft_prediction.{json,md}. The machine must have nothing else to do.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planning.planner import deployment_of, rate_of
from benchmarks.reporting import Row, Section, run_sections, setting
from benchmarks.score.app_costs import median
from benchmarks.score.live_app import LiveApp, live_app
from benchmarks.score.shared_cores import HostedProfile
from benchmarks.serving.caches import local_options, profile_asked_for
from epd.bench.media import MediaLibrary
from epd.simulate import JobMaker
from epd.simulate.drafting import DraftPlan, acceptance_of
from epd.video.demo_video import write_scene
from epd.workload.config import load_workload
from epd.workload.requests import Workload

TOPOLOGIES = ("1epd", "1e1p1d")
SEED, NUM_REQUESTS, NUM_OTHERS, LOAD = 51, 40, 16, 0.35
PART: Row = {"text_tokens": "16..32", "output_tokens": 120}
ANSWERS: Mapping[str, Row] = {
    "greedy": {},
    "drawn, frequency penalty .1": {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.1},
    "drawn, frequency penalty .3": {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.3},
}
# Of tokens per pass and of the share of TPOT that is left, live and simulated: an acceptance that is the same
# everywhere stands for answers that begin freely and repeat themselves later.
TOLERANCE = 0.25
_NUM_HELD = "epd_spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what happened. tpot_s: median."""

    tokens_per_pass: float
    tpot_s: float


def workload_at(num_requests: int, rate: float) -> Workload:
    return load_workload(None, {"rate": rate, "num_requests": num_requests, "mix": [PART]}).resolve()


def simulated(profile: HostedProfile, topology: str, workload: Workload, drafts: DraftPlan | None) -> Outcome:
    deployment = replace(deployment_of(topology), drafts=drafts)
    result = profile.simulation(deployment).run(JobMaker(profile).jobs(workload.requests(SEED)))
    return Outcome(result.tokens_per_pass, median(result.tpot_s))


def live(
    app: LiveApp,
    library: MediaLibrary,
    workload: Workload,
    extra: Row,
    seed: int = SEED,
    at_once: int | None = None,
) -> Outcome:
    before = app.counter(_NUM_HELD)
    result = app.send(workload, library, seed=seed, extra=extra, concurrency=at_once)
    num_tokens = sum((each.completion_tokens or 1) - 1 for each in result.records)
    num_passes = num_tokens - (app.counter(_NUM_HELD) - before)
    return Outcome(num_tokens / num_passes, result.figures(0.0).tpot_s)


# Results


@contextmanager
def serving(topology: str, draft: str) -> Iterator[tuple[LiveApp, MediaLibrary]]:
    """Runs the application, which has answered a few questions."""
    with tempfile.TemporaryDirectory(prefix="epd-drafts-") as name:
        folder = Path(name)
        options = [*local_options(topology), "--draft", draft]
        library = MediaLibrary(folder / "media", write_scene)
        with live_app(options, folder / "serve.log") as app:
            for extra in ANSWERS.values():
                live(app, library, workload_at(6, 2.0), extra, SEED - 1)
            yield app, library


def acceptances() -> dict[str, float]:
    """Measures how often a drafted token holds, in answers to questions that are not predicted."""
    workload = load_workload(None, {"arrival": "closed", "num_requests": NUM_OTHERS, "mix": [PART]}).resolve()
    with serving("1epd", "prompt-lookup") as (app, library):
        return {
            name: acceptance_of(live(app, library, workload, extra, SEED + 1, at_once=1).tokens_per_pass)
            for name, extra in ANSWERS.items()
        }


def rows_of(profile: HostedProfile) -> list[Row]:
    found, rows = acceptances(), []
    for topology in TOPOLOGIES:
        workload = workload_at(NUM_REQUESTS, rate_of(profile, topology, PART, LOAD))
        measured: dict[tuple[str, str], Outcome] = {}
        for draft in ("none", "auto"):
            with serving(topology, draft) as (app, library):
                for name, extra in ANSWERS.items():
                    measured[name, draft] = live(app, library, workload, extra)
        for name, acceptance in found.items():
            plans = (None, DraftPlan(acceptance))
            predicted = [simulated(profile, topology, workload, each) for each in plans]
            there = measured[name, "none"], measured[name, "auto"]
            rows.append(_row(topology, name, acceptance, *there, *predicted))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _row(topology: str, name: str, acceptance: float, *outcomes: Outcome) -> Row:
    """outcomes: live without drafts and with, simulated without and with."""
    none, auto, plain, drafted = outcomes
    tokens = drafted.tokens_per_pass / auto.tokens_per_pass - 1
    left = auto.tpot_s / none.tpot_s, drafted.tpot_s / plain.tpot_s
    is_near = max(abs(tokens), abs(left[1] / left[0] - 1)) <= TOLERANCE
    return {
        "topology": topology,
        "answers": name,
        "acceptance": f"{acceptance:.2f}",
        "tokens per pass, live / simulated": f"{auto.tokens_per_pass:.2f} / {drafted.tokens_per_pass:.2f}",
        "error": f"{tokens:+.0%}",
        "within the tolerance": "yes" if is_near else "no",
        "TPOT without, ms": f"{1e3 * none.tpot_s:.1f} / {1e3 * plain.tpot_s:.1f}",
        "TPOT with, ms": f"{1e3 * auto.tpot_s:.1f} / {1e3 * drafted.tpot_s:.1f}",
        "share of the TPOT that is left": f"{left[0]:.2f} / {left[1]:.2f}",
    }


def main() -> None:
    profile = profile_asked_for(__doc__)
    run_sections(
        "draft_prediction",
        "What drafts save, live and simulated",
        {"drafts": Section(f"{NUM_REQUESTS} requests, live / simulated", lambda: rows_of(profile))},
        ["drafts"],
        lambda: setting(("torch",), checkpoint="shapes-vl, float32", load=LOAD, requests=NUM_REQUESTS),
        save=True,
    )


if __name__ == "__main__":
    main()
