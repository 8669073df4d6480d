"""Reports a comparison: goodput and cost of each layout, who wins, the simulator's error, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from epd.bench.compare import Comparison
from epd.picture import picture
from epd.workload.comparison import (
    MOST_LATE,
    Curve,
    Outcome,
    Traffic,
    Verdict,
    compared_word,
    verdicts,
)
from epd.workload.metrics import Latency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]


def goodput_rows(found: Comparison) -> list[Row]:
    """Returns a row for each traffic and layout: goodput over rounds, and beside the best plain one."""
    rows = []
    for traffic in found.question.traffic:
        curves = found.curves(traffic)
        words = {each.layout: each for each in verdicts(curves, found.layouts)}
        for curve, simulated in zip(curves, found.curves(traffic, is_simulated=True), strict=True):
            low, high = curve.spread
            rows.append(
                {
                    "traffic": traffic.name,
                    "layout": curve.layout,
                    "goodput": _goodput(curve) if curve.is_whole else "",
                    "spread": f"{low:.2f}-{high:.2f}" if curve.is_whole else "",
                    "rounds": len({each.index for each in curve.rounds}),
                    "simulated": _goodput(simulated) if curve.is_whole else "",
                    "per 1000": _cost(found, curve) if curve.is_whole else "",
                    "verdict": _said(curve, words.get(curve.layout)),
                }
            )
    return rows


def _said(curve: Curve, verdict: Verdict | None) -> str:
    """Returns the verdict for people; of a curve that lacks a rate, only that."""
    if not curve.is_whole:
        return "incomplete"
    if verdict is None:
        return ""
    return f"{verdict.word}: {verdict.ratio:.2f} ({verdict.low:.2f}-{verdict.high:.2f}) x {verdict.plain}"


def _goodput(curve: Curve) -> str:
    if curve.goodput is None:
        return ""
    return f"{'>= ' if curve.keeps_all else ''}{curve.goodput:.2f}"


def _cost(found: Comparison, curve: Curve) -> str:
    """Returns the price of a thousand requests at goodput."""
    price, devices = found.question.price_per_hour, found.question.devices
    if price is None or devices is None or not curve.goodput:
        return ""
    return f"{1000 * price * devices / (3600 * curve.goodput):.3g}"


def rate_rows(found: Comparison) -> list[Row]:
    """Returns a row for each traffic, layout and rate, measured and simulated by the same requests."""
    rows = []
    for traffic in found.question.traffic:
        pairs = zip(found.curves(traffic), found.curves(traffic, is_simulated=True), strict=True)
        for curve, simulated in pairs:
            rows += [_rate_row(traffic, curve, simulated, rate) for rate in curve.rates]
    return rows


def _rate_row(traffic: Traffic, curve: Curve, simulated: Curve, rate: float) -> Row:
    rounds, shares = curve.at(rate), [each.attained(traffic.slo) for each in curve.at(rate)]
    outcomes = [each for one in rounds for each in one.outcomes]
    theirs = [each for one in simulated.at(rate) for each in one.outcomes]
    loads = [each.load_average for each in rounds if each.load_average is not None]
    return {
        "traffic": traffic.name,
        "layout": curve.layout,
        "rate": rate,
        "rounds": len(rounds),
        "attained": f"{curve.attained(rate):.2f}",
        "spread": f"{min(shares):.2f}-{max(shares):.2f}",
        "simulated": f"{simulated.attained(rate):.2f}" if theirs else "",
        "TTFT s": _percentiles(outcomes, "ttft_s", 1),
        "simulated TTFT": _percentiles(theirs, "ttft_s", 1),
        "TPOT ms": _percentiles(outcomes, "tpot_s", 1000),
        "simulated TPOT": _percentiles(theirs, "tpot_s", 1000),
        "errors": sum(each.error is not None for each in outcomes),
        "late": f"{max(each.late_share for each in rounds):.3f}",
        "load": f"{max(loads):.0f}" if loads else "",
    }


def _percentiles(outcomes: Sequence[Outcome], name: str, factor: float) -> str:
    found = Latency.of(getattr(each, name) for each in outcomes)
    return "" if found is None else f"{factor * found.p50_s:.3g} / {factor * found.p90_s:.3g}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Holds the median of a figure at one rate, measured and simulated. name: TTFT or TPOT"""

    traffic: str
    layout: str
    rate: float
    name: str
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.measured_s - 1


def pairs_of(found: Comparison, traffic: Traffic) -> Iterator[Pair]:
    """Yields the medians of TTFT and TPOT by layout and rate."""
    curves = zip(found.curves(traffic), found.curves(traffic, is_simulated=True), strict=True)
    for curve, simulated in curves:
        for rate in sorted(set(curve.rates) & set(simulated.rates)):
            for name in ("ttft_s", "tpot_s"):
                ours, theirs = (
                    Latency.of(getattr(each, name) for one in of.at(rate) for each in one.outcomes)
                    for of in (curve, simulated)
                )
                if ours is not None and theirs is not None and ours.p50_s > 0:
                    yield Pair(traffic.name, curve.layout, rate, name[:4].upper(), ours.p50_s, theirs.p50_s)


def errors_of(found: Comparison, traffics: Sequence[Traffic] | None = None) -> list[float]:
    """Returns the relative errors of `pairs_of`, without signs. traffics: None for all"""
    asked = traffics or found.question.traffic
    return [abs(pair.error) for traffic in asked for pair in pairs_of(found, traffic)]


def p90_of(errors: Sequence[float]) -> float:
    """Returns an error that nine of ten do not exceed. errors: at least one"""
    return sorted(errors)[ceil(0.9 * len(errors)) - 1]


def cell_rows(found: Comparison) -> list[Row]:
    """Returns a row for each rate at which a split layout and plain replicas were measured.

    right: whether the simulator says as the measurement does who attains more
    """
    rows = []
    split = [each.name for each in found.layouts if each.is_split]
    plain = [each.name for each in found.layouts if not each.is_split]
    for traffic in found.question.traffic:
        measured = {each.layout: each for each in found.curves(traffic)}
        simulated = {each.layout: each for each in found.curves(traffic, is_simulated=True)}
        for layout in split:
            for base in plain:
                shared = [set(of[name].rates) for of in (measured, simulated) for name in (layout, base)]
                for rate in sorted(set.intersection(*shared)):
                    words = [
                        compared_word(of[layout].attained(rate) - of[base].attained(rate))
                        for of in (measured, simulated)
                    ]
                    rows.append(
                        {
                            "traffic": traffic.name,
                            "layout": layout,
                            "beside": base,
                            "rate": rate,
                            "measured": words[0],
                            "simulated": words[1],
                            "right": "yes" if words[0] == words[1] else "no",
                        }
                    )
    return rows


def regret_rows(found: Comparison) -> list[Row]:
    """Returns what is lost by running the layout that the simulator finds best, by measured goodput."""
    rows = []
    for traffic in found.question.traffic:
        measured = {
            each.layout: each.goodput
            for each in found.curves(traffic)
            if each.goodput is not None and each.is_whole
        }
        simulated = {
            each.layout: each.goodput
            for each in found.curves(traffic, is_simulated=True)
            if each.goodput is not None and each.layout in measured
        }
        if not simulated:
            continue
        chosen, best = (max(each, key=lambda name: each[name]) for each in (simulated, measured))
        lost = 1 - measured[chosen] / measured[best] if measured[best] else 0.0
        rows.append({"traffic": traffic.name, "simulator": chosen, "measured": best, "regret": f"{lost:.1%}"})
    return rows


def lines_of(found: Comparison) -> list[str]:
    """Returns what a reader must know before believing the figures."""
    cells, errors = cell_rows(found), errors_of(found)
    lines = [
        f"{len(found.left_out)} of {len(found.rounds)} rounds are not reported: more than {MOST_LATE:.0%} of "
        "their passes were late, or the sender was"
    ]
    if cells:
        right = sum(each["right"] == "yes" for each in cells)
        lines.append(f"the simulator says who attains more in {right} of {len(cells)} cells")
    if errors:
        lines.append(
            f"its error of median TTFT and TPOT: median {median(errors):.1%}, "
            f"p90 {p90_of(errors):.1%}, highest {max(errors):.1%}, {len(errors)} figures"
        )
    return lines


def summary(found: Comparison) -> dict[str, Any]:
    """Returns all tables, for the file."""
    return {
        "goodput": goodput_rows(found),
        "rates": rate_rows(found),
        "cells": cell_rows(found),
        "regret": regret_rows(found),
        "lines": lines_of(found),
    }


def plot(found: Comparison, path: Path) -> None:
    """Draws attainment and goodput over the rate, measured and simulated (dashed)."""
    traffics = found.question.traffic
    with picture(path, 4.6 * len(traffics) + 1.5, 7.5) as figure:
        axes = figure.subplots(2, len(traffics), squeeze=False)
        for column, traffic in enumerate(traffics):
            _draw(axes[0][column], axes[1][column], found, traffic)
        axes[0][0].set_ylabel("share that meets the objectives")
        axes[1][0].set_ylabel("requests/s within the objectives")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))


def _draw(upper: Axes, lower: Axes, found: Comparison, traffic: Traffic) -> None:
    curves = zip(found.curves(traffic), found.curves(traffic, is_simulated=True), strict=True)
    for number, (curve, simulated) in enumerate(curves):
        for of, style, label in ((curve, "-o", curve.layout), (simulated, "--", None)):
            shares = [of.attained(rate) for rate in of.rates]
            good = [rate * share for rate, share in zip(of.rates, shares, strict=True)]
            upper.plot(of.rates, shares, style, label=label, color=f"C{number}", markersize=4)
            lower.plot(of.rates, good, style, color=f"C{number}", markersize=4)
    upper.axhline(found.question.attainment, color="grey", linewidth=0.8)
    upper.set(title=traffic.name, ylim=(-0.02, 1.05))
    lower.set(xlabel="requests/s of the devices")
    lower.set_ylim(bottom=0)
