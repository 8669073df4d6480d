"""Plots a simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from epd.picture import picture
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.records import SimulationResult


def plot_simulation(result: SimulationResult, path: Path) -> None:
    """Writes one picture: the distributions of TTFT and TPOT, and TTFT over time."""
    with picture(path, 16.5, 4.2) as figure:
        axes = figure.subplots(1, 3)
        for axis, name, values in ((axes[0], "TTFT", result.ttft_s), (axes[1], "TPOT", result.tpot_s)):
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            axis.step(np.sort(values), shares, where="post")
            axis.set(xlabel=f"{name}, s", ylabel="share of requests")
        rows = result.rows[~result.rows["is_refused"]]
        axes[2].plot(rows["due"] / TICKS_PER_S, (rows["first_token"] - rows["due"]) / TICKS_PER_S, ".")
        axes[2].set(xlabel="arrival, s", ylabel="TTFT, s")
