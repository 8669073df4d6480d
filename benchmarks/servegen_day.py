"""A day of ServeGen's 35 production clients of images, in the simulator: every static layout and switching.

    git clone https://github.com/alibaba/ServeGen
    python -m benchmarks.servegen_day --data ServeGen/data/multimodal/mm-image [--quick]

layouts   the first seconds of each ten minutes, one after the other, on every layout of the devices, merged
          roles included; and with role switching from the best layouts whose stages are apart
day       the whole day on the best layout of each kind, and with role switching

Each worker is a device of the profile. Results go to benchmarks/results/servegen_day.{json,md}. The data are
not in this repository.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.reporting import Row, Section, run_sections, setting
from epd.planning.space import topologies
from epd.profiles.files import load_profile
from epd.simulate import Deployment, JobMaker, Simulation, SimulationResult
from epd.simulate.switching import Elasticity
from epd.topology import parse_topology
from epd.workload.metrics import SLO
from epd.workload.requests import Workload
from epd.workload.servegen import ClientRequest, draw_day
from epd.workload.trace import trace_arrivals, trace_shapes
from epd.workload.trace_media import TraceMedia

PROFILE = load_profile("qwen2.5-vl-7b@a100-80gb")
OBJECTIVES = SLO(ttft_s=2.0, tpot_s=0.05)
WINDOW_S, SLICE_S = 600.0, 6.0
NUM_STARTS = 3


def sliced(day: list[ClientRequest], slice_s: float) -> list[ClientRequest]:
    """Returns the requests of the first seconds of each window, as if nothing were between them."""
    kept = [one for one in day if one.time_s % WINDOW_S < slice_s]
    return [replace(one, time_s=one.time_s // WINDOW_S * slice_s + one.time_s % WINDOW_S) for one in kept]


def simulated(
    requests: list[ClientRequest], layout: str, *, switches: bool
) -> tuple[SimulationResult, float]:
    """Returns the result, and the seconds of CPU it took."""
    start_s = time.process_time()
    workload = Workload("day", trace_arrivals(requests), trace_shapes(requests, TraceMedia()))
    deployment = Deployment(parse_topology(layout), cpu_threads=64)
    elasticity = Elasticity(max_tokens=1024) if switches else None
    jobs = JobMaker(PROFILE, "frames").jobs(workload.requests(0))
    result = Simulation(PROFILE, deployment, elasticity=elasticity).run(jobs)
    return result, time.process_time() - start_s


def row(requests: list[ClientRequest], layout: str, *, switches: bool = False) -> Row:
    result, cpu_s = simulated(requests, layout, switches=switches)
    ttft_s, tpot_s = (np.percentile(values, (50, 99)) for values in (result.ttft_s, result.tpot_s))
    found = {
        "layout": layout,
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


def kind_of(layout: str) -> str:
    """Returns which stages are merged, such as "ep d"."""
    return " ".join("".join(letter for letter in part if letter.isalpha()) for part in _parts(layout))


def _parts(layout: str) -> list[str]:
    return [
        f"{group.num_workers}{''.join(sorted(stage[0] for stage in group.roles))}"
        for group in parse_topology(layout).groups
    ]


class Day:
    """The runs of both sections. rows: of every layout that stays."""

    def __init__(self, data: Path, num_devices: int, *, is_quick: bool) -> None:
        self._requests = draw_day(data, 20_000 if is_quick else None)
        self._num_devices = num_devices

    @functools.cached_property
    def static(self) -> list[Row]:
        sample = sliced(self._requests, SLICE_S)
        rows = [row(sample, str(topology)) for topology in topologies(self._num_devices)]
        return sorted(rows, key=lambda each: -each["attainment"])

    def layouts(self) -> list[Row]:
        sample = sliced(self._requests, SLICE_S)
        apart = [each["layout"] for each in self.static if kind_of(each["layout"]) == "e p d"]
        return [*(row(sample, layout, switches=True) for layout in apart[:NUM_STARTS]), *self.static]

    def whole(self) -> list[Row]:
        best = {kind_of(each["layout"]): each["layout"] for each in reversed(self.static)}
        switched = row(self._requests, best["e p d"], switches=True)
        return [switched, *(row(self._requests, layout) for layout in best.values())]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="ServeGen's mm-image")
    parser.add_argument("--devices", type=int, default=4, metavar="N", help="devices of every layout")
    parser.add_argument("--quick", action="store_true", help="20,000 requests; keeps no results")
    args = parser.parse_args()
    day = Day(args.data, args.devices, is_quick=args.quick)
    objectives = f"TTFT below {OBJECTIVES.ttft_s:g} s and TPOT below {OBJECTIVES.tpot_s:g} s"
    sections = {
        "layouts": Section(f"The first {SLICE_S:g} s of each ten minutes, {objectives}", day.layouts),
        "day": Section(f"The whole day, {objectives}", day.whole),
    }
    here = lambda: setting(["numpy"], profile=PROFILE.name, devices=args.devices, simulated=True)  # noqa: E731
    run_sections("servegen_day", "A day of ServeGen", sections, list(sections), here, save=not args.quick)


if __name__ == "__main__":
    main()
