"""A day of ServeGen's 35 production clients of images, simulated on static layouts and with switching.

    git clone https://github.com/alibaba/ServeGen
    python -m benchmarks.serving.servegen_day --data ServeGen/data/multimodal/mm-image [--plan | --whole-day]

layouts   the first seconds of each ten minutes, one after the other, on every plain layout of the planner;
          and on layouts between whose kinds of workers roles can switch, merged ones too, as they are and
          with switching
plan      with --plan: what the planner decides for 250 of these requests, and the best layouts of the
          first section, with its settings and with those of a server that is not told any
day       with --whole-day: all requests of the day on the plan

Each worker is a device of the profile. Results go to benchmarks/results/servegen_day.{json,md}; a section
that was not asked for keeps its rows. The data are not in this repository.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.reporting import Row, Section, run_sections, setting
from benchmarks.serving.servegen import ClientRequest, draw_day
from epd.control.elasticity.cluster import Roles
from epd.control.elasticity.controller import PURE_ROLES, ControllerConfig
from epd.planning.asked import planner_for
from epd.planning.search import Candidate
from epd.planning.space import Space
from epd.profiles.files import load_profile
from epd.simulate import Deployment, JobMaker, Simulation, SimulationResult
from epd.simulate.placement import Elasticity
from epd.simulate.requests import Job
from epd.topology import parse_topology
from epd.workload.metrics import SLO
from epd.workload.requests import Workload
from epd.workload.trace import trace_arrivals, trace_shapes
from epd.workload.trace_media import TraceMedia

PROFILE = load_profile("qwen2.5-vl-7b@a100-80gb")
OBJECTIVES = SLO(ttft_s=2.0, tpot_s=0.05)
WINDOW_S, SLICE_S = 600.0, 6.0
# Switching begins at these: all stages apart; or all workers encode, and some prefill and the others decode.
STARTS = ("1e2p1d", "2e1p1d", "1e1p2d", "3ep1ed", "2ep2ed")
COMPARED = ("3ep1ed", "3ep1d")
NUM_PLANNED = 250
ROLES: tuple[Roles, ...] = (*PURE_ROLES, frozenset({"encode", "prefill"}), frozenset({"encode", "decode"}))


def sliced(day: list[ClientRequest], slice_s: float) -> list[ClientRequest]:
    """Returns the requests of the first seconds of each window, as if nothing were between them."""
    kept = [one for one in day if one.time_s % WINDOW_S < slice_s]
    return [replace(one, time_s=one.time_s // WINDOW_S * slice_s + one.time_s % WINDOW_S) for one in kept]


def jobs_of(requests: list[ClientRequest]) -> Iterator[Job]:
    workload = Workload("day", trace_arrivals(requests), trace_shapes(requests, TraceMedia()))
    return JobMaker(PROFILE, "frames").jobs(workload.requests(0))


def by_default(layout: str) -> Deployment:
    return Deployment(parse_topology(layout), cpu_threads=64, encode_beside=False)


def planned(sample: list[ClientRequest], num_devices: int) -> Candidate:
    """Returns the planner's decision for a part of the requests, evenly spread, and `OBJECTIVES`."""
    few = sample[:: max(1, len(sample) // NUM_PLANNED)][:NUM_PLANNED]
    jobs, space = list(jobs_of(few)), Space(num_devices)
    return planner_for(PROFILE, jobs, OBJECTIVES, space, base=by_default("1epd")).search().winner.candidate


def simulated(
    requests: list[ClientRequest], deployment: Deployment, *, switches: bool
) -> tuple[SimulationResult, float]:
    """Returns the result, and the seconds of CPU it took."""
    start_s = time.process_time()
    elasticity = Elasticity(ControllerConfig(roles=ROLES), max_tokens=1024) if switches else None
    result = Simulation(PROFILE, deployment, elasticity=elasticity).run(jobs_of(requests))
    return result, time.process_time() - start_s


def row(
    requests: list[ClientRequest], deployment: Deployment, *, switches: bool = False, **extra: str
) -> Row:
    result, cpu_s = simulated(requests, deployment, switches=switches)
    ttft_s, tpot_s = (np.percentile(values, (50, 99)) for values in (result.ttft_s, result.tpot_s))
    found = {
        "layout": str(deployment.topology),
        **extra,
        "roles": "switch" if switches else "stay",
        "requests": len(requests),
        "attainment": round(result.attainment(OBJECTIVES), 4),
        "TTFT p50 / p99 s": f"{ttft_s[0]:.2f} / {ttft_s[1]:.2f}",
        "TPOT p50 / p99 s": f"{tpot_s[0]:.4f} / {tpot_s[1]:.4f}",
        "refused": int(result.rows["is_refused"].sum()),
        "switches": len(result.switches),
        "CPU s": round(cpu_s, 1),
    }
    print(found, file=sys.stderr, flush=True)
    return found


class Day:
    """Runs the sections of the benchmark. Rows: the highest attainment first."""

    def __init__(self, data: Path, num_devices: int, *, is_quick: bool) -> None:
        self._requests = draw_day(data, 20_000 if is_quick else None)
        self._num_devices = num_devices

    def layouts(self) -> list[Row]:
        sample = sliced(self._requests, SLICE_S)
        static = [str(topology) for topology in Space(self._num_devices).topologies()]
        starts = [start for start in STARTS if parse_topology(start).num_workers == self._num_devices]
        rows = [row(sample, by_default(layout)) for layout in dict.fromkeys([*static, *starts])]
        return _ranked([*rows, *(row(sample, by_default(start), switches=True) for start in starts)])

    def plan(self) -> list[Row]:
        sample = sliced(self._requests, SLICE_S)
        plan = planned(sample, self._num_devices)
        rows = [row(sample, plan.deployment, settings=f"planned: {plan.settings}")]
        for layout in COMPARED:
            like = plan.settings.deployment(parse_topology(layout), by_default(layout))
            rows += [
                row(sample, like, settings="as planned"),
                row(sample, by_default(layout), settings="default"),
            ]
        return _ranked(rows)

    def whole(self) -> list[Row]:
        plan = planned(sliced(self._requests, SLICE_S), self._num_devices)
        return [row(self._requests, plan.deployment, settings=f"planned: {plan.settings}")]


def _ranked(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda each: -each["attainment"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="ServeGen's mm-image")
    parser.add_argument("--devices", type=int, default=4, metavar="N", help="devices of every layout")
    parser.add_argument("--quick", action="store_true", help="the first 20,000 requests; keeps no results")
    parser.add_argument("--plan", action="store_true", help="plans for the day, 1 CPU minute")
    parser.add_argument("--whole-day", action="store_true", help="every request on the plan, 5 CPU minutes")
    args = parser.parse_args()
    day = Day(args.data, args.devices, is_quick=args.quick)
    objectives = f"TTFT below {OBJECTIVES.ttft_s:g} s and TPOT below {OBJECTIVES.tpot_s:g} s"
    sections = {
        "layouts": Section(f"The first {SLICE_S:g} s of each ten minutes, {objectives}", day.layouts),
        "plan": Section(f"The plan for {NUM_PLANNED} of these requests, {objectives}", day.plan),
        "day": Section(f"The whole day, {objectives}", day.whole),
    }
    here = lambda: setting(["numpy"], profile=PROFILE.name, devices=args.devices, simulated=True)  # noqa: E731
    wanted = ["day" if args.whole_day else "plan" if args.plan else "layouts"]
    run_sections("servegen_day", "A day of ServeGen", sections, wanted, here, save=not args.quick)


if __name__ == "__main__":
    main()
