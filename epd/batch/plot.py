"""Plots how busy the stages of a batch were over time."""

from __future__ import annotations

from pathlib import Path

from epd.batch.utilisation import Utilisation
from epd.picture import picture


def plot_utilisation(utilisation: Utilisation, path: Path) -> None:
    """Draws a line for each stage: the share of each stretch of time that it worked."""
    with picture(path, 10, 4) as figure:
        axes = figure.subplots()
        steps = utilisation.steps()
        start_s = utilisation.samples[0].time_s if utilisation.samples else 0.0
        names = list(dict.fromkeys(name for _, shares in steps for name in shares))
        times_s = [time_s - start_s for time_s, _ in steps]
        for name in names:
            axes.plot(times_s, [shares.get(name, 0.0) for _, shares in steps], label=name)
        axes.set(xlabel="s", ylabel="share of time busy", ylim=(0, 1.05))
        axes.grid(alpha=0.3)
        if names:
            axes.legend()
