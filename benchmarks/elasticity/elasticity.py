"""Role switching in the simulator, against every static layout of the same eight devices.

    python -m benchmarks.elasticity.elasticity [--quick] [SECTION ...]

table6    the paper's load (EPD, table 6), three draws of its arrivals
day       a day in thirty minutes: pictures in its first half, long answers in its second; the share of
          requests that keep their objectives, on all 21 layouts and with switching from three of them
waves     pictures and long answers that come and go in turns, on a layout that bears both peaks, where no
          change is needed: what switching spoils there, by period
merged    the same turns at half the load on four devices, whose workers have two roles each: switching
          among the sets of the topology and their parts, against the static layouts and single roles

Costs are those fitted to the EPD paper (`benchmarks/published/paper.py`); all is simulated, so this machine
does not matter. Results go to benchmarks/results/elasticity.{json,md,png}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.elasticity.load_waves import LoadWave, day, requests_of, square_wave
from benchmarks.published.paper import (
    FOUR_K,
    TABLE_6_ELASTICITY,
    TABLE_6_SHAPES,
    Experiment,
    limits,
    paper_deployment,
    paper_profile,
)
from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from epd.control.elasticity.assignment import switchable_roles
from epd.control.elasticity.controller import ControllerConfig
from epd.simulate import Deployment, Job, JobMaker, Simulation, SimulationResult
from epd.simulate.placement import Elasticity
from epd.topology import parse_topology
from epd.workload.metrics import SLO
from epd.workload.requests import RequestShape

PROFILE = paper_profile()
NUM_DEVICES = 8
# 1.3 s of encoding; and about 1.5 s of decoding in a full batch, of an allowance of 1024 tokens.
PICTURES = RequestShape(50, 40, (FOUR_K,) * 3)
TALK = RequestShape(200, 400)
OBJECTIVES = SLO(ttft_s=6.0, tpot_s=0.08)
DAY_S = 1800.0
ELASTICITY = Elasticity(max_tokens=1024)
STARTS = ("3e1p4d", "5e1p2d", "2e2p4d")
WAVES_S = 900.0
MERGED = ("1ed3ep", "2ed2ep", "3ed1ep")


def layouts() -> Iterator[str]:
    """Every split of the devices into the three roles."""
    for num_encode in range(1, NUM_DEVICES - 1):
        for num_prefill in range(1, NUM_DEVICES - num_encode):
            yield f"{num_encode}e{num_prefill}p{NUM_DEVICES - num_encode - num_prefill}d"


def jobs(tides: list[LoadWave], duration_s: float, seed: int) -> list[Job]:
    return list(JobMaker(PROFILE, "frames").jobs(requests_of(tides, duration_s, seed)))


def simulate(topology: str, work: list[Job], elasticity: Elasticity | None = None) -> SimulationResult:
    deployment = Deployment(parse_topology(topology), language=limits(8), decode=limits(128), cpu_threads=64)
    return Simulation(PROFILE, deployment, elasticity=elasticity).run(work)


def table6_rows() -> list[Row]:
    rows = []
    for name, elasticity in (("static", None), ("switching", TABLE_6_ELASTICITY)):
        experiment = Experiment(paper_deployment("5e1p2d"), 3.0, TABLE_6_SHAPES, elasticity)
        runs = [experiment.run(PROFILE, number) for number in range(3)]
        last_s = [run.rows["due"].max() / 1e12 for run in runs]
        moves = [
            "".join(roles for at_s, _, roles in run.switches if at_s < end_s)
            for run, end_s in zip(runs, last_s, strict=True)
        ]
        rows.append(
            {
                "5e1p2d": name,
                "TTFT mean s": round(float(np.mean([run.ttft_s.mean() for run in runs])), 2),
                "TPOT mean s": round(float(np.mean([run.tpot_s.mean() for run in runs])), 4),
                "E2E mean s": round(float(np.mean([run.e2e_s.mean() for run in runs])), 1),
                "lost": sum(int(run.rows["is_refused"].sum()) for run in runs),
                "encoders turned decoders while requests came": " ".join(str(len(each)) for each in moves),
            }
        )
    return rows


def day_rows(highs: tuple[float, ...], seeds: range) -> list[Row]:
    rows = []
    for high in highs:
        for seed in seeds:
            work = jobs(day(PICTURES, TALK, high, DAY_S), DAY_S, seed)
            static = {name: simulate(name, work).attainment(OBJECTIVES) for name in layouts()}
            best = max(static, key=lambda name: static[name])
            switched = [simulate(name, work, ELASTICITY) for name in STARTS]
            rows.append(
                {
                    "peak requests/s": high,
                    "seed": seed,
                    "requests": len(work),
                    "best static in hindsight": best,
                    "its attainment": round(static[best], 3),
                    "median of 21 static": round(float(np.median(list(static.values()))), 3),
                    **{
                        f"switching from {name}": round(run.attainment(OBJECTIVES), 3)
                        for name, run in zip(STARTS, switched, strict=True)
                    },
                    "switches": " ".join(str(len(run.switches)) for run in switched),
                }
            )
            print(rows[-1], file=sys.stderr)
    return rows


def wave_rows(periods_s: tuple[float, ...]) -> list[Row]:
    rows = []
    for period_s in periods_s:
        work = waves(period_s, (0.2, 2.2), (0.3, 2.5))
        static, switched = simulate("3e1p4d", work), simulate("3e1p4d", work, ELASTICITY)
        rows.append(
            {
                "period s": period_s,
                "static 3e1p4d: E2E mean s": round(float(static.e2e_s.mean()), 1),
                "switching: E2E mean s": round(float(switched.e2e_s.mean()), 1),
                "switches in 15 minutes": sum(at_s < WAVES_S for at_s, *_ in switched.switches),
            }
        )
    return rows


def merged_rows(periods_s: tuple[float, ...]) -> list[Row]:
    """Mean seconds to the end of an answer, and attainment, by period."""
    rows = []
    for period_s in periods_s:
        work = waves(period_s, (0.1, 1.0), (0.15, 1.25))
        static = {name: simulate(name, work) for name in MERGED}
        switched = {name: simulate(name, work, switching(name)) for name in (*MERGED, "2e1p1d")}
        rows.append(
            {
                "period s": period_s,
                **{f"static {name}": _shown(run) for name, run in static.items()},
                **{f"switching from {name}": _shown(run) for name, run in switched.items()},
                "switches": " ".join(str(len(run.switches)) for run in switched.values()),
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


def waves(period_s: float, pictures: tuple[float, float], talk: tuple[float, float]) -> list[Job]:
    """Returns requests of both kinds in turns. pictures, talk: least and most requests a second."""
    tides = [
        LoadWave(PICTURES, square_wave(*pictures, period_s), pictures[1]),
        LoadWave(TALK, square_wave(*talk, period_s, 0.5), talk[1]),
    ]
    return jobs(tides, WAVES_S, 0)


def switching(topology: str) -> Elasticity:
    roles = switchable_roles(parse_topology(topology))
    return Elasticity(ControllerConfig(roles=roles), max_tokens=ELASTICITY.max_tokens)


def _shown(run: SimulationResult) -> str:
    return f"{run.e2e_s.mean():.1f} ({run.attainment(OBJECTIVES):.2f})"


def plot(high: float) -> None:
    """Workers of each role through the day, and how many requests came."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    work = jobs(day(PICTURES, TALK, high, DAY_S), DAY_S, 0)
    result = simulate(STARTS[0], work, ELASTICITY)
    roles = {spec.name: next(iter(spec.roles))[0] for spec in parse_topology(STARTS[0]).workers()}
    times_s, counts = [0.0], [{letter: list(roles.values()).count(letter) for letter in "epd"}]
    for at_s, worker, letters in result.switches:
        roles[worker] = letters
        times_s.append(at_s)
        counts.append({letter: list(roles.values()).count(letter) for letter in "epd"})
    figure, axes = pyplot.subplots(2, 1, figsize=(8, 5.5), sharex=True, layout="constrained")
    for letter, name in zip("epd", ("encode", "prefill", "decode"), strict=True):
        axes[0].step(
            [*times_s, DAY_S], [each[letter] for each in (*counts, counts[-1])], where="post", label=name
        )
    axes[0].set(ylabel="workers", ylim=(0, NUM_DEVICES))
    for is_picture, name in ((True, "pictures"), (False, "long answers")):
        due_s = [job.due / 1e12 for job in work if bool(job.groups) == is_picture]
        axes[1].hist(due_s, bins=60, range=(0, DAY_S), histtype="step", label=name)
    axes[1].set(xlabel="time, s", ylabel=f"requests in {DAY_S / 60:.0f} s")
    for axis in axes:
        axis.legend()
    figure.savefig(RESULTS / "elasticity.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--quick", action="store_true", help="one day, two periods; keeps no results")
    args = parser.parse_args()
    highs, seeds = ((2.6,), range(1)) if args.quick else ((2.2, 2.6), range(1))
    periods_s = (10.0, 160.0) if args.quick else (10.0, 40.0, 160.0, 320.0, 420.0, 600.0)
    sections = {
        "table6": Section("Table 6 of the EPD paper", table6_rows),
        "day": Section(
            "A day: share of requests with TTFT below 6 s and TPOT below 0.08 s",
            lambda: day_rows(highs, seeds),
        ),
        "waves": Section("Waves, on a layout that bears both peaks", lambda: wave_rows(periods_s)),
        "merged": Section(
            "Waves, on four devices with merged roles: E2E mean s (attainment)",
            lambda: merged_rows(periods_s),
        ),
    }
    unknown = set(args.sections) - sections.keys()
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    here = lambda: setting(["numpy"], devices=NUM_DEVICES, simulated=True)  # noqa: E731
    run_sections(
        "elasticity",
        "Elasticity, simulated",
        sections,
        args.sections or list(sections),
        here,
        save=not args.quick,
        module="elasticity.elasticity",
    )
    if not args.quick and "day" in (args.sections or sections):
        plot(2.6)


if __name__ == "__main__":
    main()
