"""Whether splitting pays at equal devices: the same workers split and colocated, each as if it had a device.

    python -m benchmarks.epd_pays [--quick] [--mix NAME] [--rounds N] [--dilate N]

Workers are threads of the real app with shapes-vl. A pass lasts as long as the mix's profile says for the
work that the live scheduler put into it, times N, and so do gaps between arrivals, limits of waiting, times
of the controller of roles and the start of a new role, so that the cores of this machine have the time to
compute it all: N is how much slower everything goes than on the devices. All figures are divided by it again.
Three workers at two factors show whether that changes anything.
Passes that took longer nevertheless are counted as late; a round with more than 5 % of them is not reported.
For the same reason a patch and a token of a prompt stand for many of the device's, in costs and in limits.
Reading media and moving embeddings, keys and values is real and is not paced.

Layouts are the best that the planner finds for a mix: of workers with one role each (split), of `ep` and `d`
(vLLM's), and merged, each with the settings that it chooses. All get the same requests, round by round, at
random times (Poisson). The simulator's figures for the same requests stand beside the measured ones.
Goodput is the highest rate at which 90 % of the requests meet both objectives, on a line between rates.
Rounds are kept one by one in benchmarks/results/epd_pays_rounds.jsonl, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import matplotlib
import numpy as np
import torch

from benchmarks.epd_pays_live import Round, Times
from benchmarks.epd_pays_mixes import MIXES, Mix
from benchmarks.epd_pays_plan import predicted
from benchmarks.epd_pays_rounds import (
    MOST_LATE,
    ROUNDS,
    THREE,
    Case,
    cases,
    kept_rounds,
    layout_of,
    measure,
    planned,
    three_workers,
)  # fmt: skip
from benchmarks.reporting import RESULTS, Row, Section, run_sections, setting
from epd.workload.metrics import SLO

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ATTAINED = 0.9
# Shares of requests that differ by less than this are taken for equal.
LEAST_DIFFERENCE = 0.05
KINDS = ("merged", "split", "ep+d")
# How much slower than the devices, on two cores that others use too.
DILATE: Mapping[str, float] = {"four 4K images": 10.0, "texts, each second a long video": 24.0}
Point = tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """All rounds of one layout at one rate that may be reported, and what the simulator says of them."""

    mix: Mix
    kind: str
    variant: str
    rate: float
    dilate: float
    rounds: tuple[tuple[int, Round], ...]

    @property
    def times(self) -> list[Times]:
        return [each for _, one in self.rounds for each in one.times]

    @cached_property
    def simulated(self) -> tuple[Round, ...]:
        layout = layout_of(planned(self.mix)["slo"], self.kind, self.variant)
        return tuple(
            predicted(self.mix, layout, self.mix.arrivals(self.rate, index)) for index, _ in self.rounds
        )

    @property
    def simulated_times(self) -> list[Times]:
        return [each for one in self.simulated for each in one.times]

    @property
    def topology(self) -> str:
        return layout_of(planned(self.mix)["slo"], self.kind, self.variant).topology

    def row(self) -> Row:
        shares = [attained(one.times, self.mix.slo) for _, one in self.rounds]
        late = max(one.late_share for _, one in self.rounds)
        return {
            "mix": self.mix.name,
            "layout": f"{self.topology} {self.variant}".strip(),
            "rate": self.rate,
            "dilated": self.dilate,
            "rounds": len(self.rounds),
            "TTFT p50/90/99 s": figures(each.ttft_s for each in self.times),
            "simulated TTFT": figures(each.ttft_s for each in self.simulated_times),
            "TPOT p50/90/99 ms": figures((1000 * each.tpot_s for each in self.times), 1),
            "simulated TPOT": figures((1000 * each.tpot_s for each in self.simulated_times), 1),
            "attained": round(float(np.mean(shares)), 2),
            "lowest-highest": f"{min(shares):.2f}-{max(shares):.2f}",
            "simulated": round(attained(self.simulated_times, self.mix.slo), 2),
            "late": round(late, 3),
        }


def figures(values: Iterator[float], digits: int = 2) -> str:
    """Returns three percentiles as text."""
    found = np.percentile(list(values), (50, 90, 99))
    return " / ".join(f"{each:.{digits}f}" for each in found)


def p99(values: Iterator[float]) -> float:
    return float(np.percentile(list(values), 99))


def attained(times: Sequence[Times], slo: SLO) -> float:
    """Returns the share of answers that met the objectives. slo: of TTFT and TPOT."""
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    return float(np.mean([each.ttft_s <= slo.ttft_s and each.tpot_s <= slo.tpot_s for each in times]))


def cells_of(rounds: Mapping[Case, Round]) -> tuple[list[Cell], list[Case]]:
    """Returns what may be reported, by mix, kind and rate, and the rounds that had too many late passes."""
    late = [case for case, one in rounds.items() if one.late_share > MOST_LATE]
    kept: dict[tuple[str, str, str, float, float], list[tuple[int, Round]]] = {}
    for case in sorted(rounds.keys() - set(late), key=_order):
        key = (case.mix, case.kind, case.variant, case.rate, case.dilate)
        kept.setdefault(key, []).append((case.round_index, rounds[case]))
    return [Cell(MIXES[mix], *rest, tuple(found)) for (mix, *rest), found in kept.items()], late  # type: ignore[arg-type]


def _order(case: Case) -> tuple[int, int, str, float, float, int]:
    place = list(MIXES).index(case.mix), KINDS.index(case.kind)
    return *place, case.variant, case.rate, case.dilate, case.round_index


def goodput(points: Sequence[Point]) -> float:
    """Returns the highest rate at which enough requests meet the objectives.

    points: (rate, share that met them), by rate
    """
    best, last_rate, last = 0.0, 0.0, 1.0
    for rate, share in points:
        if share >= ATTAINED:
            best = rate
        elif last >= ATTAINED:
            best = last_rate + (rate - last_rate) * (last - ATTAINED) / (last - share)
        last_rate, last = rate, share
    return best


def goodput_rows(cells: Sequence[Cell]) -> list[Row]:
    """Compares goodput with merged workers, for both objectives, where the lowest rate of both is kept."""
    found = []
    for mix, name, slo in _objectives(cells):
        bases = _goodputs(_by_rate(cells, mix, "merged"), slo)
        for kind in KINDS:
            own = _by_rate(cells, mix, kind)
            if not own:
                continue
            measured, simulated = _goodputs(own, slo)
            found.append(
                {
                    "mix": mix.name,
                    "objectives": name,
                    "layout": own[min(own)].topology,
                    "rates": f"{min(own):g}-{max(own):g}",
                    "goodput 1/s": round(measured, 2) or f"below {min(own):g}",
                    "simulated": round(simulated, 2) or f"below {min(own):g}",
                    "over merged": _ratio(measured, bases[0]),
                    "simulated over merged": _ratio(simulated, bases[1]),
                    "all rates kept": "yes" if measured == max(own) else "",
                }
            )
    return found


def _goodputs(own: Mapping[float, Cell], slo: SLO) -> Point:
    """Returns goodput, measured and simulated; 0 where the lowest rate is not kept."""
    found = []
    for times in (
        {rate: cell.times for rate, cell in own.items()},
        {rate: cell.simulated_times for rate, cell in own.items()},
    ):
        points = [(rate, attained(times[rate], slo)) for rate in own]
        found.append(goodput(points) if points and points[0][1] >= ATTAINED else 0.0)
    return found[0], found[1]


def _ratio(value: float, base: float) -> float | str:
    return round(value / base, 2) if value and base else ""


def _objectives(cells: Sequence[Cell]) -> Iterator[tuple[Mix, str, SLO]]:
    for mix in {cell.mix.name: cell.mix for cell in cells}.values():
        for name, slo in (("strict", mix.slo), ("loose", mix.loose)):
            yield mix, f"{name}: {slo.ttft_s:g} s, {1000 * (slo.tpot_s or 0):g} ms", slo


def _by_rate(cells: Sequence[Cell], mix: Mix, kind: str) -> dict[float, Cell]:
    """Returns the planned layout of a kind; of two factors that with more rounds, then the larger one."""
    own = (cell for cell in cells if cell.mix is mix and cell.kind == kind and not cell.variant)
    return {
        cell.rate: cell for cell in sorted(own, key=lambda each: (each.rate, len(each.rounds), each.dilate))
    }


def _pairs(cells: Sequence[Cell], mix: Mix, kind: str) -> Iterator[tuple[float, Cell, Cell]]:
    """Yields (rate, layout, merged workers), each with the rounds that both have."""
    merged = _by_rate(cells, mix, "merged")
    for rate, cell in _by_rate(cells, mix, kind).items():
        base = merged.get(rate)
        indices = {} if base is None else dict(cell.rounds).keys() & dict(base.rounds).keys()
        if base is not None and indices:
            kept = (tuple(one for one in each.rounds if one[0] in indices) for each in (cell, base))
            yield rate, replace(cell, rounds=next(kept)), replace(base, rounds=next(kept))


def verdict_rows(cells: Sequence[Cell]) -> list[Row]:
    """Says for each point whether the layout attains more than merged workers, measured and simulated."""
    found = []
    for mix, name, slo in _objectives(cells):
        for kind in KINDS[1:]:
            for rate, cell, base in _pairs(cells, mix, kind):
                measured = attained(cell.times, slo) - attained(base.times, slo)
                simulated = attained(cell.simulated_times, slo) - attained(base.simulated_times, slo)
                found.append(
                    {
                        "mix": mix.name,
                        "objectives": name,
                        "layout": cell.topology,
                        "rate": rate,
                        "attained more": round(measured, 2),
                        "simulated": round(simulated, 2),
                        "measured": _word(measured),
                        "planner says": _word(simulated),
                        "right": "yes" if _word(measured) == _word(simulated) else "no",
                    }
                )
    return found


def _word(difference: float) -> str:
    if abs(difference) < LEAST_DIFFERENCE:
        return "equal"
    return "wins" if difference > 0 else "loses"


def tail_rows(cells: Sequence[Cell]) -> list[Row]:
    """Compares the 99th percentiles with merged workers: TPOT, and of texts alone beside the videos."""
    found = []
    for mix in {cell.mix.name: cell.mix for cell in cells}.values():
        for kind in KINDS[1:]:
            for _, cell, base in _pairs(cells, mix, kind):
                found += [
                    _tail_row(cell, base, of)
                    for of in ("all answers", "texts")
                    if of == "all answers" or any(not each.has_media for each in cell.times)
                ]
    return found


def _tail_row(cell: Cell, base: Cell, of: str) -> Row:
    def tails(times: Sequence[Times]) -> tuple[float, float]:
        some = [each for each in times if of == "all answers" or not each.has_media]
        return 1000 * p99(each.tpot_s for each in some), 1000 * p99(each.gap_s for each in some)

    (ours, gap), (theirs, their_gap) = tails(cell.times), tails(base.times)
    simulated = tails(base.simulated_times)[0] / tails(cell.simulated_times)[0]
    return {
        "mix": cell.mix.name,
        "of": of,
        "layout": cell.topology,
        "rate": cell.rate,
        "TPOT p99 ms": round(ours, 1),
        "merged": round(theirs, 1),
        "times better": round(theirs / ours, 2),
        "simulated": round(simulated, 2),
        "longest gap p99 ms": round(gap, 1),
        "merged gap": round(their_gap, 1),
    }


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Draws attainment and TPOT p99 over the rate, measured and simulated (dashed)."""
    mixes = list({cell.mix.name: cell.mix for cell in cells}.values())
    figure, axes = plt.subplots(2, len(mixes), figsize=(6 * len(mixes), 7), squeeze=False)
    for column, mix in enumerate(mixes):
        for number, kind in enumerate(KINDS):
            own = list(_by_rate(cells, mix, kind).values())
            rates = [cell.rate for cell in own]
            label, colour = f"{own[0].topology if own else kind}", f"C{number}"
            for place, of in enumerate((lambda times: attained(times, mix.slo), _tpot_p99_ms)):  # noqa: B023 - used at once
                measured, simulated = (
                    [of(each) for each in ([c.times for c in own], [c.simulated_times for c in own])[n]]
                    for n in (0, 1)
                )
                axes[place][column].plot(rates, measured, marker="o", color=colour, label=label)
                axes[place][column].plot(rates, simulated, linestyle="--", color=colour)
        axes[0][column].set(title=mix.name, ylabel="share that meets both objectives", ylim=(0, 1.05))
        axes[0][column].axhline(ATTAINED, color="grey", linewidth=0.8)
        axes[0][column].legend()
        axes[1][column].set(xlabel="requests per second of the devices", ylabel="TPOT p99, ms", yscale="log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _tpot_p99_ms(times: Sequence[Times]) -> float:
    return 1000 * p99(each.tpot_s for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rate; results are not kept")
    parser.add_argument("--mix", action="append", choices=list(MIXES), help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="0: only the tables (default: %(default)s)")
    parser.add_argument("--dilate", type=float, help=f"default: {DILATE}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    todo = [
        case
        for index in range(options.rounds)
        for name in options.mix or MIXES
        for case in (
            *cases(MIXES[name], index, options.dilate or DILATE[name]),
            *three_workers(MIXES[name], index),
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.jsonl" if options.quick else ROUNDS
        measure(todo[: len(KINDS)] if options.quick else todo, path)
        report(kept_rounds(path), save=not options.quick)


def report(rounds: Mapping[Case, Round], *, save: bool) -> None:
    """Writes the tables and the plot."""
    cells, late = cells_of(rounds)
    print(f"{len(late)} of {len(rounds)} rounds are not reported: more than {MOST_LATE:.0%} late passes")
    plain = [cell for cell in cells if not cell.variant]
    checked = [cell for cell in cells if cell.variant == THREE]
    varied = [cell for cell in cells if cell.variant not in ("", THREE)]
    kinds = {(cell.mix.name, cell.kind, cell.rate) for cell in varied}
    beside = [cell for cell in plain if (cell.mix.name, cell.kind, cell.rate) in kinds]
    sections = {
        "live": Section("Measured, and simulated", lambda: [cell.row() for cell in plain]),
        "goodput": Section("Goodput beside merged workers", lambda: goodput_rows(plain)),
        "tails": Section("TPOT p99 beside merged workers, as times better", lambda: tail_rows(plain)),
        "verdicts": Section("Where splitting wins and loses", lambda: verdict_rows(plain)),
        "dilation": Section("Three workers, slowed more and less", lambda: [cell.row() for cell in checked]),
        "variants": Section(
            "Without sharding, without overlap, with roles that follow",
            lambda: [cell.row() for cell in sorted((*beside, *varied), key=lambda cell: cell.mix.name)],
        ),
    }
    here = {"rounds_left_out": f"{len(late)} of {len(rounds)}, with more than {MOST_LATE:.0%} late passes"}
    run_sections(
        "epd_pays",
        "Split and colocated, at equal devices",
        sections,
        list(sections),
        lambda: setting(("torch", "transformers"), **here),
        save=save,
    )
    if save:
        draw(plain, RESULTS / "epd_pays.png")


if __name__ == "__main__":
    main()
