"""Tables of `benchmarks.epd_pays`: what was measured and simulated, goodput, tails, where splitting wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from benchmarks.epd_pays.live import Layout, Round, Times
from benchmarks.epd_pays.mixes import MIXES, Mix
from benchmarks.epd_pays.plan import KINDS, predicted
from benchmarks.epd_pays.rounds import MOST_LATE, Case, layout_of, planned
from benchmarks.reporting import Row
from epd.workload.comparison import compared_word, goodput
from epd.workload.metrics import SLO

ATTAINED = 0.9
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
    def layout(self) -> Layout:
        return layout_of(planned(self.mix)["slo"], self.kind, self.variant)

    @cached_property
    def simulated(self) -> tuple[Round, ...]:
        return tuple(
            predicted(self.mix, self.layout, self.mix.arrivals(self.rate, index)) for index, _ in self.rounds
        )

    @property
    def simulated_times(self) -> list[Times]:
        return [each for one in self.simulated for each in one.times]

    @property
    def topology(self) -> str:
        return self.layout.topology

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


def goodput_rows(cells: Sequence[Cell]) -> list[Row]:
    """Compares goodput with merged workers, for both objectives, where the lowest rate of both is kept."""
    found = []
    for mix, name, slo in _objectives(cells):
        bases = _goodputs(by_rate(cells, mix, "merged"), slo)
        for kind in KINDS:
            own = by_rate(cells, mix, kind)
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
        found.append(goodput(points, ATTAINED) if points and points[0][1] >= ATTAINED else 0.0)
    return found[0], found[1]


def _ratio(value: float, base: float) -> float | str:
    return round(value / base, 2) if value and base else ""


def _objectives(cells: Sequence[Cell]) -> Iterator[tuple[Mix, str, SLO]]:
    for mix in {cell.mix.name: cell.mix for cell in cells}.values():
        for name, slo in (("strict", mix.slo), ("loose", mix.loose)):
            yield mix, f"{name}: {slo.ttft_s:g} s, {1000 * (slo.tpot_s or 0):g} ms", slo


def variant_rows(cells: Sequence[Cell]) -> list[Row]:
    """Returns planned layouts beside their variants, where both were measured alike.

    That is in the same rounds, two at least, and at the same factor. A difference of single rounds may be
    that of what else the machine did.
    """

    def setting(cell: Cell) -> tuple[object, ...]:
        return cell.mix.name, cell.kind, cell.rate, cell.dilate, tuple(index for index, _ in cell.rounds)

    plain = {setting(cell) for cell in cells if not cell.variant}
    varied = {setting(cell) for cell in cells if cell.variant and len(cell.rounds) > 1} & plain
    return [cell.row() for cell in cells if setting(cell) in varied]


def by_rate(cells: Sequence[Cell], mix: Mix, kind: str) -> dict[float, Cell]:
    """Returns the planned layout of a kind; of two factors that with more rounds, then the larger one."""
    own = (cell for cell in cells if cell.mix is mix and cell.kind == kind and not cell.variant)
    return {
        cell.rate: cell for cell in sorted(own, key=lambda each: (each.rate, len(each.rounds), each.dilate))
    }


def _pairs(cells: Sequence[Cell], mix: Mix, kind: str) -> Iterator[tuple[float, Cell, Cell]]:
    """Yields (rate, layout, merged workers), each with the rounds that both have."""
    merged = by_rate(cells, mix, "merged")
    for rate, cell in by_rate(cells, mix, kind).items():
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
                        "measured": compared_word(measured),
                        "planner says": compared_word(simulated),
                        "right": "yes" if compared_word(measured) == compared_word(simulated) else "no",
                    }
                )
    return found


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
