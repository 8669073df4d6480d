"""Prints the output of every command: data on stdout, progress on stderr."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from epd.late_module import LateModule
from epd.types import StageTimings, ceil_div

if TYPE_CHECKING:
    from rich import console as rich_console
    from rich import progress as rich_progress
    from rich import table as rich_table
else:
    rich_console, rich_progress, rich_table = map(LateModule, ("rich.console", "rich.progress", "rich.table"))

_MB = 10**6
_WIDE = 10_000  # columns: more than any table has
_STAGES = {
    "probe_s": "probe",
    "decode_video_s": "decode video (wait)",
    "preprocess_s": "preprocess",
    "encode_s": "encode",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "total_s": "total",
}


class ShowProgress(Protocol):
    """Draws the progress of a long task."""

    def __call__(self, num_done: int, num_all: int, /) -> None: ...


def stderr_console() -> rich_console.Console:
    """Returns a rich console on the current stderr."""
    return rich_console.Console(stderr=True, highlight=False, soft_wrap=True)


def stdout_console() -> rich_console.Console:
    """Returns a rich console on the current stdout. In a file or a pipe no cell of a table is cut."""
    width = None if sys.stdout.isatty() else _WIDE
    return rich_console.Console(highlight=False, soft_wrap=True, width=width)


def stream_text(piece: str) -> None:
    """Prints a piece of an answer on stdout at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def note(text: str) -> None:
    """Prints a line on stderr that a user should know and that is no error."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """Returns a number and what it counts, in the plural unless it is one."""
    return f"{number} {noun}{'s' * (number != 1)}"


def print_json(record: object) -> None:
    """Prints one JSON object on stdout."""
    print(json.dumps(record, ensure_ascii=False))


@contextmanager
def status(text: str) -> Iterator[None]:
    """Shows a text on a terminal while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    with stderr_console().status(text):
        yield


@contextmanager
def progress_bar(description: str) -> Iterator[ShowProgress]:
    """Shows a bar on stderr, on a terminal only, removed when all is done or the block ends."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=stderr_console(), transient=True) as progress:
        task = progress.add_task(description, total=None)

        def show(num_done: int, num_all: int) -> None:
            progress.update(task, completed=num_done, total=num_all)
            if num_done >= num_all:
                progress.stop()

        yield show


@contextmanager
def loading() -> Iterator[None]:
    """Says on a terminal, at once, that a block of imports takes a while, and takes the line back in the end.

    Garbage is not looked for meanwhile: imports make none, and the search takes a twentieth of their time.
    """
    is_shown = sys.stderr.isatty()
    if is_shown:
        sys.stderr.write("loading ...\r")
        sys.stderr.flush()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if is_shown:
            sys.stderr.write("\x1b[2K\r")


@contextmanager
def loading_bar() -> Iterator[ShowProgress]:
    """Shows a bar in megabytes while weights are loaded. Takes bytes."""
    with progress_bar("loading the model, MB") as show:
        yield lambda num_done, num_all: show(ceil_div(num_done, _MB), ceil_div(num_all, _MB))


def stage_table(columns: Mapping[str, StageTimings]) -> rich_table.Table:
    """Returns a table of stages by name; of video decoding, it shows only the time waited for it."""
    table = rich_table.Table("stage", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right")
    for field, name in _STAGES.items():
        seconds = [f"{getattr(timings, field):.3f}" for timings in columns.values()]
        table.add_row(name, *seconds, end_section=field == "decode_s")
    return table
