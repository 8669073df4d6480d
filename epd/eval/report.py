"""Prints the rows of an evaluation as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from epd.eval.items import FULL
from epd.eval.rows import EvalRow

_COLUMNS = ("kept", "tokens", "KV MB", "right", "95 %", "of full", "won", "lost", "p", "TTFT")


def print_rows(rows: Sequence[EvalRow], console: Console) -> None:
    """Prints a table for each number of frames, with a line for each row."""
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
