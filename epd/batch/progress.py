"""Shows a run on a terminal: lines done, lines per second, time left, how busy each stage is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from epd import console


class ShowBatch(Protocol):
    """Draws the progress. shares: of the last seconds that each stage worked."""

    def __call__(self, num_done: int, num_all: int, shares: Mapping[str, float]) -> None: ...


@contextmanager
def batch_bar() -> Iterator[ShowBatch]:
    """Yields a function that updates a bar on stderr; on a terminal only, and gone afterwards."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    columns = (
        TextColumn("lines"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(text_format="", text_format_no_percentage="", show_speed=True),
        TimeRemainingColumn(),
        TextColumn("{task.fields[busy]}"),
    )
    with Progress(*columns, console=console.stderr_console(), transient=True) as progress:
        task = progress.add_task("lines", total=None, busy="")

        def show(num_done: int, num_all: int, shares: Mapping[str, float]) -> None:
            busy = " ".join(f"{name} {share:4.0%}" for name, share in shares.items())
            progress.update(task, completed=num_done, total=num_all, busy=busy)

        yield show
