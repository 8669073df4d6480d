"""Plots accuracy against retention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.eval.items import FULL
from epd.eval.rows import EvalRow
from epd.picture import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_rows(rows: Sequence[EvalRow], path: Path) -> None:
    """Writes one picture: a panel for each number of frames, a line for each method."""
    frames = sorted({row.num_frames for row in rows})
    with picture(path, 5.5 * len(frames), 4.5) as figure:
        axes = figure.subplots(1, len(frames), squeeze=False, sharey=True)
        for panel, num_frames in zip(axes[0], frames, strict=True):
            _plot_panel(panel, [row for row in rows if row.num_frames == num_frames])
            panel.set_title(f"{num_frames} frames")
        axes[0][0].set_ylabel("accuracy")
        axes[0][-1].legend(loc="lower right")


def _plot_panel(axes: Axes, rows: Sequence[EvalRow]) -> None:
    full = [row for row in rows if row.retention == 1.0][:1]
    for row in full:
        axes.axhline(row.accuracy, color="black", linestyle=":", label="all tokens")
    for method in dict.fromkeys(row.method for row in rows if row.method != FULL.method):
        mine = sorted(
            [*full, *(row for row in rows if row.method == method and row.retention < 1.0)],
            key=lambda row: row.retention,
        )
        _plot_line(axes, method, mine)
    axes.set(xlabel="share of visual tokens kept", xscale="log")
    ticks = sorted({row.retention for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


# Methods that look at nothing: the baseline for any other.
_CONTROLS = ("random", "uniform")


def _plot_line(axes: Any, method: str, rows: Sequence[EvalRow]) -> None:
    is_control = method in _CONTROLS
    below = [row.accuracy - row.interval.low for row in rows]
    above = [row.interval.high - row.accuracy for row in rows]
    axes.errorbar(
        [row.retention for row in rows],
        [row.accuracy for row in rows],
        yerr=[below, above],
        label=f"{method} (control)" if is_control else method,
        linestyle="--" if is_control else "-",
        color={"random": "0.6", "uniform": "0.4"}.get(method),
        marker="o",
        markersize=4,
        capsize=2,
        elinewidth=0.6,
    )
