"""Whether splitting pays beside plain replicas: five kinds of traffic on three paced devices.

    python -m benchmarks.epd_pays.replicas [--traffic NAME] [--rounds N] [--work FOLDER] [--report]

Does what `epd bench compare --paced` does, for traffic with objectives of its own. Workers are threads of the
real application with shapes-vl, each paced as if it had an A100 with Qwen2.5-VL-7B. A patch or token stands
for 32 of the device's. All goes 16 times slower than on the devices, so that shared cores have the time.
Each kind of traffic has a file in the folder, so several may run beside each other. --report joins them.
Rounds are kept, and what is there is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.reporting import RESULTS, Section, run_sections, setting
from epd.bench.compare import Case, Comparison, dump, load
from epd.bench.compare_report import cell_rows, goodput_rows, lines_of, plot, rate_rows, regret_rows, summary
from epd.profiles.files import load_profile
from epd.serve_app.cli.compare import made, paced_serve, run_all, simulated
from epd.workload.comparison import Layout, Question, Traffic
from epd.workload.config import WorkloadConfig
from epd.workload.metrics import SLO

PROFILE = "qwen2.5-vl-7b@a100-80gb"
LAYOUTS = ("3x1epd", "3x1epd+chunk=512", "1e1p1d", "1e2pd", "2ep1d")
NAME = "replicas"
_VIDEO = {"videos": 1, "video_size": "64x64", "video_fps": 4, "output_tokens": 16}
_LONG = {**_VIDEO, "video_s": 24}


def _traffic(name: str, rates: tuple[float, ...], slo: SLO, *parts: dict[str, Any]) -> Traffic:
    mix = [{"text_tokens": 8, **part} for part in parts]
    workload = WorkloadConfig.model_validate({"name": name, "num_requests": 16, "mix": mix})
    return Traffic(workload=workload, rates=rates, slo=slo, dilate=16)


TRAFFIC = (
    _traffic("one image", (6, 24), SLO(0.5, 0.04), {"images": 1, "output_tokens": 16}),
    _traffic("four images", (3, 6), SLO(1.0, 0.04), {"images": 4, "output_tokens": 16}),
    _traffic("short video", (8, 32), SLO(1.0, 0.04), {**_VIDEO, "video_s": 6}),
    _traffic("long video", (4, 16), SLO(3.0, 0.04), _LONG),
    _traffic("texts beside long videos", (4, 16), SLO(2.0, 0.025), {"output_tokens": 24, "weight": 2}, _LONG),
)


def question(traffic: tuple[Traffic, ...], rounds: int) -> Question:
    return Question(
        layouts=LAYOUTS,
        traffic=traffic,
        rounds=rounds,
        warmup=1,
        profile=PROFILE,
        is_paced=True,
        patches=32,
        tokens=32,
        price_per_hour=load_profile(PROFILE).price_per_hour,
    )


def measure(traffic: Traffic, rounds: int, folder: Path) -> None:
    """Runs what is not in the folder's file yet."""
    path = folder / f"{traffic.name.replace(' ', '_')}.json"
    found = joined([path] if path.exists() else [], (traffic,), rounds)
    run_all(found, LAYOUTS, path, path.with_suffix(".media"), lambda: paced_serve(found.question))


def joined(paths: Iterable[Path], traffic: tuple[Traffic, ...], rounds: int) -> Comparison:
    """Returns what was measured of some traffic as one comparison."""
    rates = {each.name: each.rates for each in traffic}
    found = Comparison(question(traffic, rounds))
    for part in map(load, paths):
        kept = {key: one for key, one in part.rounds.items() if one.rate in rates.get(one.traffic, ())}
        found.rounds |= kept
    for name, layout, rate, index in found.rounds:
        of = next(each for each in traffic if each.name == name)
        case = Case(of, Layout.parse(layout), rate, index)
        found.simulated[case.key] = simulated(found, case)
    return found


def report(found: Comparison) -> None:
    """Writes the page, the plot, and the file that repeats it."""
    sections = {
        "goodput": Section("Goodput, and who wins", lambda: goodput_rows(found)),
        "rates": Section("Each rate", lambda: rate_rows(found)),
        "cells": Section("Who attains more, measured and simulated", lambda: cell_rows(found)),
        "regret": Section("What the simulator's choice costs", lambda: regret_rows(found)),
    }
    here = {
        "rounds": lines_of(found)[0],
        "simulator": "; ".join(lines_of(found)[1:]),
        "left_out_by_the_simulator": "a server computes the template before the media while it reads them, "
        "and 15 tokens of it stand for 480 of the device's: simulated TTFT is longer",
        "read_with": "most cells have one round of 16 requests, on cores that other work kept busy",
    }
    run_sections(
        NAME,
        "Splits beside plain replicas, at equal devices",
        sections,
        list(sections),
        lambda: setting(("torch", "transformers"), **here),
        module="epd_pays.replicas",
    )
    plot(found, RESULTS / f"{NAME}.png")
    (RESULTS / f"{NAME}_comparison.json").write_text(dump(found, made(), summary(found)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traffic", choices=[each.name for each in TRAFFIC], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("build/replicas"), help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for traffic in TRAFFIC:
        if not options.report and options.traffic in (None, traffic.name):
            measure(traffic, options.rounds, options.work)
    if options.report or options.traffic is None:
        report(joined(sorted(options.work.glob("*.json")), TRAFFIC, options.rounds))


if __name__ == "__main__":
    main()
