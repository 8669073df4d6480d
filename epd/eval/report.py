"""Prints the rows of an evaluation as tables, and plots accuracy against retention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.console import Console
from rich.table import Table

from epd.errors import RequestError
from epd.eval.items import FULL
from epd.eval.rows import EvalRow
from epd.eval.statistics import Interval
from epd.picture import picture

_COLUMNS = ("kept", "tokens", "KV MB", "right", "95 %", "of full", "won", "lost", "p", "TTFT")

Part = Literal["kind", "duration"]


def as_part(name: str) -> Part:
    """Returns the name as that of a part. Raises RequestError for an unknown one."""
    for part in get_args(Part):
        if name == part:
            known: Part = part
            return known
    raise RequestError(f"--by is {name!r}; give one of {', '.join(get_args(Part))}")


def print_rows(rows: Sequence[EvalRow], console: Console, by: Part | None = None) -> None:
    """Prints a table for each number of frames, with a line for each row. by: print accuracy by it, too."""
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
        if by is not None:
            _print_parts(mine, by, console)
    console.print("kept: share of visual tokens. right: % of answers, with its 95 % interval.")
    other = {row.against for row in rows} - {FULL.method}
    against = f"with {other.pop()}" if other else "with all tokens"
    console.print("of full: % of the accuracy with all tokens. TTFT: cold, s.")
    console.print(f"won, lost: right only here, only {against}. p: exact McNemar test of these.")


def _print_parts(rows: Sequence[EvalRow], by: Part, console: Console) -> None:
    """Prints the accuracy of each part of the questions, part by part, with a line for each row.

    F1: of the facts of descriptions, each of which is right with all facts and no other.
    """
    lines = [(part, row) for row in rows for part in (row.kinds if by == "kind" else row.duration_groups)]
    names = list(dict.fromkeys(part.name for part, _ in lines))
    table = Table(by, "method", box=None, pad_edge=False, collapse_padding=True)
    for name in ("kept", "questions", "right", "95 %", "F1"):
        table.add_column(name, justify="right")
    for part, row in sorted(lines, key=lambda line: names.index(line[0].name)):
        right = _percent(part.accuracy, part.interval)
        facts = "" if part.facts_f1 is None else f"{part.facts_f1:.3f}"
        table.add_row(part.name, row.method, f"{row.retention:g}", str(part.num_questions), *right, facts)
    console.print(table if names else f"no question names its {by}")
    console.print()


def _percent(accuracy: float, interval: Interval) -> tuple[str, str]:
    return f"{accuracy * 100:.1f}", f"{interval.low * 100:.1f}-{interval.high * 100:.1f}"


def _cells(row: EvalRow) -> list[str]:
    is_full = row.method == FULL.method
    return [
        f"{row.retention:g}",
        str(row.visual_tokens),
        f"{row.kv_bytes / 1e6:.3g}",
        *_percent(row.accuracy, row.interval),
        "" if is_full or row.relative_accuracy is None else f"{row.relative_accuracy * 100:.1f}",
        "" if is_full else str(row.wins),
        "" if is_full else str(row.losses),
        "" if is_full or row.p_value is None else f"{row.p_value:.1g}",
        "" if row.ttft_s is None else f"{row.ttft_s:.3f}",
    ]


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
