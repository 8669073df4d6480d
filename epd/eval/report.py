"""Rows for people: a table on the terminal, and accuracy against retention as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.eval.items import FULL
from epd.eval.rows import EvalRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

_COLUMNS = ("kept", "tokens", "KV MB", "right", "95 %", "of full", "won", "lost", "p", "TTFT")


def print_rows(rows: Sequence[EvalRow], console: Console) -> None:
    """A table for each number of frames, a line for each row."""
    from rich.table import Table

    for num_frames in sorted({row.num_frames for row in rows}):
        mine = [row for row in rows if row.num_frames == num_frames]
        table = Table("method", box=None, pad_edge=False, collapse_padding=True)
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for row in mine:
            table.add_row(row.method, *_cells(row))
        console.print(
            f"{num_frames} frames, {mine[0].num_questions} questions, {mine[0].num_videos} videos\n"
        )
        console.print(table)
        console.print()
    console.print("kept: share of visual tokens. right: % of answers, with its 95 % interval.")
    other = {row.against for row in rows} - {FULL.method}
    against = f"with {other.pop()}" if other else "with all tokens"
    console.print("of full: % of the accuracy with all tokens. TTFT: cold, s.")
    console.print(f"won, lost: right only here, only {against}. p: exact McNemar test of these.")


def _cells(row: EvalRow) -> list[str]:
    is_full = row.method == FULL.method
    return [
        f"{row.retention:g}",
        str(row.visual_tokens),
        f"{row.kv_bytes / 1e6:.3g}",
        f"{row.accuracy * 100:.1f}",
        f"{row.interval.low * 100:.1f}-{row.interval.high * 100:.1f}",
        "" if is_full or row.relative_accuracy is None else f"{row.relative_accuracy * 100:.1f}",
        "" if is_full else str(row.wins),
        "" if is_full else str(row.losses),
        "" if is_full or row.p_value is None else f"{row.p_value:.1g}",
        "" if row.ttft_s is None else f"{row.ttft_s:.3f}",
    ]


def plot_rows(rows: Sequence[EvalRow], path: Path) -> None:
    """Writes one picture: a panel for each number of frames, a line for each method."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    frames = sorted({row.num_frames for row in rows})
    figure, axes = pyplot.subplots(
        1, len(frames), figsize=(5.5 * len(frames), 4.5), layout="constrained", squeeze=False, sharey=True
    )
    for panel, num_frames in zip(axes[0], frames, strict=True):
        _plot_panel(panel, [row for row in rows if row.num_frames == num_frames])
        panel.set_title(f"{num_frames} frames")
    axes[0][0].set_ylabel("accuracy")
    axes[0][-1].legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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


# Methods that look at nothing: what any other has to beat.
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
