"""Plots a simulation, and simulated figures beside published ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from epd.published.tables import Row
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.records import SimulationResult


def plot_simulation(result: SimulationResult, path: Path) -> None:
    """Writes one picture: the distributions of TTFT and TPOT, and TTFT over time."""
    figure = Figure(figsize=(16.5, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, name, values in ((axes[0], "TTFT", result.ttft_s), (axes[1], "TPOT", result.tpot_s)):
        shares = np.arange(1, len(values) + 1) / max(1, len(values))
        axis.step(np.sort(values), shares, where="post")
        axis.set(xlabel=f"{name}, s", ylabel="share of requests")
    rows = result.rows[~result.rows["is_refused"]]
    axes[2].plot(rows["due"] / TICKS_PER_S, (rows["first_token"] - rows["due"]) / TICKS_PER_S, ".")
    axes[2].set(xlabel="arrival, s", ylabel="TTFT, s")
    figure.savefig(path, dpi=120)


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Simulated beside published, one pair of bars for each row; fitted ones are hatched."""
    figure = Figure(figsize=(1.5 + 0.45 * len(rows), 5), layout="constrained")
    axis = figure.subplots()
    places = np.arange(len(rows))
    axis.bar(places - 0.2, [row.published for row in rows], 0.4, label="published")
    bars = axis.bar(places + 0.2, [row.simulated for row in rows], 0.4, label="simulated")
    for bar, row in zip(bars, rows, strict=True):
        bar.set_hatch("//" if row.is_fitted else "")
    labels = [f"{row.system}, {row.case}\n{row.metric}" for row in rows]
    axis.set_xticks(places, labels, rotation=60, ha="right", fontsize=7)
    axis.legend()
    figure.savefig(path, dpi=120)
