"""Prints simulated figures beside published ones."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.published.tables import Row, worst


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Prints a table, and the largest error of a row that was not fitted."""
    table = Table("system", "case", "metric", box=None, pad_edge=False)
    for name in ("simulated", "published", "error"):
        table.add_column(name, justify="right")
    table.add_column("fitted")
    for row in rows:
        figures = (f"{row.simulated:.3g}", row.published_text, f"{row.error:+.1%}")
        table.add_row(row.system, row.case, row.metric, *figures, "yes" if row.is_fitted else "")
    console.print(table)
    if any(not row.is_fitted for row in rows):
        far = worst(rows)
        console.print(
            f"largest error of a row that was not fitted: {far.error:+.1%} ({far.system}, {far.case})"
        )
