"""Plots simulated figures beside published ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.published.tables import Row
from epd.picture import picture


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Writes one picture: a pair of bars for each row; fitted ones are hatched."""
    with picture(path, 1.5 + 0.45 * len(rows), 5) as figure:
        axis = figure.subplots()
        places = np.arange(len(rows))
        axis.bar(places - 0.2, [row.published for row in rows], 0.4, label="published")
        bars = axis.bar(places + 0.2, [row.simulated for row in rows], 0.4, label="simulated")
        for bar, row in zip(bars, rows, strict=True):
            bar.set_hatch("//" if row.is_fitted else "")
        labels = [f"{row.system}, {row.case}\n{row.metric}" for row in rows]
        axis.set_xticks(places, labels, rotation=60, ha="right", fontsize=7)
        axis.legend()
