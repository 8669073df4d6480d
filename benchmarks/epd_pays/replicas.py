"""Whether splitting pays beside replicas: five kinds of traffic on three paced devices, in virtual time.

    python -m benchmarks.epd_pays.replicas [--work FOLDER] [--rounds N] [--report]

Does what `epd bench compare --paced` does, for traffic with objectives of its own. The real application runs:
fronts, planning, schedulers, pools and transfers. Each worker is paced as if it had an A100 with
Qwen2.5-VL-7B. A patch or token stands for 32 of the device's. The clock is virtual: no pass is late, and a
round is the same on every machine. A pass computes nothing, and answers are one letter again and again.
HTTP is left out. Reading media and moving embeddings, keys and values take no time.
A round lasts until a queue that grows is seen, see `duration_s`. The same with 16 requests stands beside.
Rounds are kept, and what is there is not run again.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.epd_pays.virtual import run_case, virtual_layouts
from benchmarks.epd_pays.virtual_workers import virtual_workers
from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from epd.bench.compare import Case, Comparison, dump, load
from epd.bench.compare_report import (
    cell_rows,
    errors_of,
    goodput_rows,
    lines_of,
    p90_of,
    pairs_of,
    plot,
    rate_rows,
    regret_rows,
    summary,
)
from epd.bench.media import MediaLibrary
from epd.profiles.files import load_profile
from epd.serve_app.cli.compare import costs_of, made, simulated
from epd.video.demo_video import write_scene
from epd.workload.comparison import Layout, Outcome, Question, Round, Traffic
from epd.workload.config import WorkloadConfig
from epd.workload.metrics import SLO, Latency
from tests.faults.pool import read_once

# qwen2.5-vl-7b@a100-80gb as it was computed when the live rounds were run.
PROFILE = "benchmarks/results/replicas_profile.json"
LAYOUTS = ("3x1epd", "3x1epd+chunk=512", "1e1p1d", "1e2pd", "2ep1d")
NAME = "replicas"
ROUNDS, ATTAINMENT = 3, 0.9
# An overload that a round must show: half of the step between two rates.
LEAST_OVERLOAD = 0.2
LIVE = RESULTS / f"{NAME}_live.json"  # of an earlier run on a clock of a machine
_KEPT = "rounds.json"
_VIDEO = {"videos": 1, "video_size": "64x64", "video_fps": 4, "output_tokens": 16}
_LONG = {**_VIDEO, "video_s": 24}


def duration_s(slo: SLO) -> float:
    """Returns how long requests must come, so that a queue which grows is seen.

    Devices that get 1 + x times what they can do are x * t behind after t seconds. A request is in time while
    that is less than its time to the first token: in the first ttft_s / x seconds. That must be less than
    ATTAINMENT of the round.
    """
    return (slo.ttft_s or 0.0) / (ATTAINMENT * LEAST_OVERLOAD)


def _traffic(name: str, rates: tuple[float, ...], slo: SLO, *parts: dict[str, Any]) -> Traffic:
    """rates: each at most 1 + 2 * LEAST_OVERLOAD times the one before, or a little more"""
    mix = [{"text_tokens": 8, **part} for part in parts]
    workload = WorkloadConfig.model_validate({"name": name, "duration_s": duration_s(slo), "mix": mix})
    return Traffic(workload=workload, rates=rates, slo=slo)


TRAFFIC = (
    _traffic("one image", (6, 8.5, 12, 17, 24), SLO(0.5, 0.04), {"images": 1, "output_tokens": 16}),
    _traffic("four images", (3, 4.2, 6), SLO(1.0, 0.04), {"images": 4, "output_tokens": 16}),
    _traffic("short video", (8, 11, 16, 22), SLO(1.0, 0.04), {**_VIDEO, "video_s": 6}),
    _traffic("long video", (4, 5.7, 8, 11), SLO(3.0, 0.04), _LONG),
    _traffic(
        "texts beside long videos",
        (4, 5.7, 8, 11, 16),
        SLO(2.0, 0.025),
        {"output_tokens": 24, "weight": 2},
        _LONG,
    ),
)


def few_requests() -> tuple[Traffic, ...]:
    """Returns the traffic of the live rounds: 16 requests each, which end before a queue has grown."""
    return tuple(each.model_copy(update={"dilate": 1.0}) for each in load(LIVE).question.traffic)


def question(traffic: tuple[Traffic, ...], rounds: int = ROUNDS) -> Question:
    return Question(
        layouts=LAYOUTS,
        traffic=traffic,
        rounds=rounds,
        warmup=1,
        attainment=ATTAINMENT,
        profile=PROFILE,
        is_paced=True,
        patches=32,
        tokens=32,
        price_per_hour=load_profile(PROFILE).price_per_hour,
    )


def measure(found: Comparison, folder: Path) -> None:
    """Runs what is not in the folder's file yet."""
    slos = {each.name: each.slo for each in found.question.traffic}
    for one in rounds_of(found, found.cases(LAYOUTS), folder / "media"):
        found.rounds[one.key] = one
        part = folder / "rounds.part"
        part.write_text(dump(found, made(), {}), encoding="utf-8")
        part.replace(folder / _KEPT)
        print(*one.key, f"{one.attained(slos[one.traffic]):.2f}", flush=True)


def rounds_of(found: Comparison, cases: Iterable[Case], media: Path) -> Iterator[Round]:
    """Runs cases in virtual time. media: folder for what is drawn."""
    library, serve = (
        MediaLibrary(media, write_scene),
        virtual_layouts(found.question, costs_of(found.question)),
    )
    with read_once(), virtual_workers():
        for case in cases:
            library.draw([*found.requests(case), *found.warm_requests(case)], lambda *_: None)
            yield run_case(found, case, serve, library)


def simulate(found: Comparison) -> None:
    """Simulates all rounds, as the simulator is now."""
    known = {each.name: each for each in found.question.traffic}
    for name, layout, rate, index in found.rounds:
        case = Case(known[name], Layout.parse(layout), rate, index)
        found.simulated[case.key] = simulated(found, case)


def live_rows(found: Comparison, live: Comparison) -> list[Row]:
    """Returns the rounds that were measured on a machine's clock too: the same requests, and none late."""
    slos = {each.name: each.slo for each in found.question.traffic}
    pairs = [
        (one, found.rounds[one.key]) for one in live.rounds.values() if one.counts and one.key in found.rounds
    ]
    return [
        {
            "traffic": one.traffic,
            "layout": one.layout,
            "rate": one.rate,
            "attained live": f"{one.attained(slos[one.traffic]):.2f}",
            "virtual": f"{virtual.attained(slos[one.traffic]):.2f}",
            "TTFT s live": f"{_median(one.outcomes, 'ttft_s'):.3f}",
            "TTFT virtual": f"{_median(virtual.outcomes, 'ttft_s'):.3f}",
            "TPOT ms live": f"{1000 * _median(one.outcomes, 'tpot_s'):.1f}",
            "TPOT virtual": f"{1000 * _median(virtual.outcomes, 'tpot_s'):.1f}",
        }
        for one, virtual in pairs
    ]


def _median(outcomes: Sequence[Outcome], name: str) -> float:
    found = Latency.of(getattr(each, name) for each in outcomes)
    return found.p50_s if found else float("nan")


def error_rows(found: Comparison) -> list[Row]:
    """Returns the simulator's errors by traffic, and the cells in which it says who attains more."""
    rows = []
    for traffic in found.question.traffic:
        errors = errors_of(found, [traffic])
        cells = [each for each in cell_rows(found) if each["traffic"] == traffic.name]
        if errors:
            rows.append(
                {
                    "traffic": traffic.name,
                    "figures": len(errors),
                    "median error": f"{median(errors):.1%}",
                    "p90": f"{p90_of(errors):.1%}",
                    "highest": f"{max(errors):.1%}",
                    "cells": len(cells),
                    "right": sum(each["right"] == "yes" for each in cells),
                }
            )
    return rows


def first_tokens(found: Comparison) -> Comparison:
    """Returns the same rounds, asked for half of the time to the first token, and for no other."""
    traffic = tuple(
        each.model_copy(update={"slo": SLO((each.slo.ttft_s or 0.0) / 2)}) for each in found.question.traffic
    )
    asked = Comparison(found.question.model_copy(update={"traffic": traffic}), found.rounds.values())
    asked.simulated = found.simulated
    return asked


def length_rows(short: Comparison, found: Comparison) -> list[Row]:
    """Returns the verdict on each split by a few requests, and by rounds that show an overload."""
    pairs = zip(goodput_rows(short), goodput_rows(found), strict=True)
    return [
        {
            "traffic": row["traffic"],
            "layout": row["layout"],
            "16 requests": few["verdict"],
            "as long as an overload needs": row["verdict"],
        }
        for few, row in pairs
        if row["verdict"]
    ]


def objective_rows(found: Comparison) -> list[Row]:
    """Returns what is asked of each traffic, and how many splits win and lose by it."""
    rows = []
    for asked in (found, first_tokens(found)):
        told = [(row["traffic"], row["verdict"].partition(":")[0]) for row in goodput_rows(asked)]
        for traffic in asked.question.traffic:
            slo = traffic.slo
            words = [word for name, word in told if name == traffic.name]
            rows.append(
                {
                    "traffic": traffic.name,
                    "requests come for s": f"{traffic.workload.duration_s:.1f}",
                    "TTFT s": slo.ttft_s,
                    "TPOT ms": "any" if slo.tpot_s is None else f"{1000 * slo.tpot_s:g}",
                    **{f"splits that {word[:-1]}": words.count(word) for word in ("wins", "loses")},
                    "equal": words.count("equal"),
                }
            )
    return rows


def report(found: Comparison, short: Comparison) -> None:
    """Writes the page, the plot, and the file that repeats it."""
    sections = {
        "objectives": Section("What is asked", lambda: objective_rows(found)),
        "lengths": Section("What short rounds hide", lambda: length_rows(short, found)),
        "goodput": Section("Goodput, and who wins", lambda: goodput_rows(found)),
        "first": Section(
            "The same rounds, if only half of the time to the first token counts",
            lambda: goodput_rows(first_tokens(found)),
        ),
        "regret": Section("What the simulator's choice costs", lambda: regret_rows(found)),
        "errors": Section("The simulator's errors of median TTFT and TPOT", lambda: error_rows(found)),
        "rates": Section("Each rate", lambda: rate_rows(found)),
        "cells": Section("Who attains more, measured and simulated", lambda: cell_rows(found)),
        "live": Section(
            "On a clock of a machine, and in virtual time: 16 requests a round",
            lambda: live_rows(short, load(LIVE)),
        ),
    }
    run_sections(
        NAME,
        "Splits beside plain replicas, at equal devices",
        sections,
        list(sections),
        lambda: setting(("torch", "transformers"), **_here(found)),
        module="epd_pays.replicas",
    )
    plot(found, RESULTS / f"{NAME}.png")
    told = {
        **summary(found),
        "pairs": [asdict(each) for of in found.question.traffic for each in pairs_of(found, of)],
    }
    bare = Comparison(found.question)  # its rounds are the same again on every machine
    (RESULTS / f"{NAME}_comparison.json").write_text(dump(bare, made(), told), encoding="utf-8")


def _here(found: Comparison) -> dict[str, str]:
    """Returns what a reader must know before believing the figures."""
    seeds = Counter(Counter(key[:3] for key in found.rounds).values())
    return {
        "rounds": lines_of(found)[0],
        "simulator": "; ".join(lines_of(found)[1:]),
        "left_out": "HTTP, and what computing, reading media and moving data take beside the device's passes",
        "length": f"requests come for the allowed TTFT over {ATTAINMENT:g} x {LEAST_OVERLOAD:g}: devices "
        f"that get {1 + LEAST_OVERLOAD:g} times what they can do then miss the objective. Rates are "
        f"{1 + 2 * LEAST_OVERLOAD:g} times apart, so a gain below that is of a line between two rates",
        "seeds": "; ".join(f"{number} in {cells} cells" for number, cells in sorted(seeds.items()))
        + ". Spreads are of the seeds",
    }


def _measured(folder: Path, traffic: tuple[Traffic, ...], rounds: int, *, runs: bool) -> Comparison:
    """Returns what a folder holds, with the rounds that were missing if it `runs`."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / _KEPT
    found = Comparison(question(traffic, rounds), load(kept).rounds.values() if kept.exists() else ())
    if runs:
        measure(found, folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/replicas"), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="seeds a cell (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    short = _measured(options.work / "short", few_requests(), options.rounds, runs=not options.report)
    found = _measured(options.work, TRAFFIC, options.rounds, runs=not options.report)
    simulate(found)
    report(found, short)


if __name__ == "__main__":
    main()
