"""What the planner says of the mixes of `benchmarks.epd_pays`: the best layouts, and each point's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.epd_pays.live import Layout, Round, Times
from benchmarks.epd_pays.mixes import Arrival, Mix
from epd.planning.goodput import MAX_LOAD
from epd.planning.search import LEAST_GAIN, Planner, Scored
from epd.planning.space import Space
from epd.planning.traffic import planner_for
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.deployment import Deployment
from epd.simulate.placement import Elasticity
from epd.simulate.simulation import Simulation
from epd.topology import Topology, parse_topology
from epd.workload.metrics import SLO

# Kinds of plain layouts that are compared, by the letters of their workers.
FAMILIES: Mapping[str, frozenset[str]] = {
    "merged": frozenset({"epd"}),
    "split": frozenset({"e", "p", "d"}),
    "ep+d": frozenset({"ep", "d"}),
}
KINDS = tuple(FAMILIES)
_READERS = 64  # threads that read media, which takes no time here


def planner_of(mix: Mix, slo: SLO) -> Planner:
    jobs, space = mix.jobs(mix.arrivals(1.0, 0)), Space(mix.num_devices)
    return planner_for(mix.profile, jobs, slo, space, base=_deployment("1epd"))


def _deployment(topology: str) -> Deployment:
    """Returns a layout as `benchmarks/epd_pays/live.py` runs it: merged workers encode in turns."""
    return Deployment(parse_topology(topology), cpu_threads=_READERS, encode_beside=False)


def family_of(topology: Topology) -> str:
    letters = frozenset(group.letters for group in topology.groups)
    return next((name for name, each in FAMILIES.items() if each == letters), "")


def best_of_families(planner: Planner) -> dict[str, Scored]:
    """Returns the layout and settings with the highest goodput of each kind that keeps the objectives."""
    best = dict[str, Scored]()
    for candidate in planner.candidates():
        name = family_of(candidate.topology)
        floor = LEAST_GAIN * best[name].goodput if name in best else 0.0
        if not name or MAX_LOAD * candidate.bound <= floor:
            continue
        found = planner.goodput(candidate, floor)
        if found > floor:
            best[name] = Scored(candidate, found)
    return best


def predicted(mix: Mix, layout: Layout, arrivals: Sequence[Arrival]) -> Round:
    """Simulates a round as `epd plan` does: the device's costs, and media that take no time to read."""
    base = replace(_deployment(layout.topology), is_overlapped=layout.is_overlapped)
    deployment = layout.settings.deployment(base.topology, base)
    elasticity = Elasticity() if layout.is_elastic else None
    result = Simulation(mix.profile, deployment, elasticity=elasticity).run(mix.jobs(arrivals))
    times = (
        Times(bool(arrival.kind.media), *_seconds(row), float("nan"))
        for arrival, row in zip(arrivals, result.rows, strict=True)
    )
    return Round(tuple(times), 0.0, len(result.switches))


def _seconds(row: Mapping[str, int]) -> tuple[float, float]:
    if row["is_refused"]:
        return float("inf"), float("inf")
    first, num_gaps = row["first_token"], max(1, row["output_tokens"] - 1)
    return (first - row["due"]) / TICKS_PER_S, (row["end"] - first) / num_gaps / TICKS_PER_S
