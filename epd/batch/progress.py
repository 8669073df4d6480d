"""Shows a run: as a bar on a terminal, as a line each minute elsewhere, and as JSON in a file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from epd import console
from epd.errors import EPDError, RequestError

_LINE_EVERY_S = 60.0
_FILE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Says how far a run is.

    num_done, num_all: lines of this run. num_failed: lines in the file of failures.
    lines_per_s: since the model was loaded.
    shares: of the last seconds that each stage worked.
    """

    num_done: int
    num_all: int
    num_failed: int
    lines_per_s: float
    shares: Mapping[str, float]

    @property
    def left_s(self) -> float | None:
        """Returns the seconds left at the rate so far, None before the first line."""
        return (self.num_all - self.num_done) / self.lines_per_s if self.num_done else None

    def line(self) -> str:
        """Returns the progress for people."""
        left = "unknown" if self.left_s is None else f"{self.left_s / 60:.0f} min"
        return (
            f"{self.num_done} of {self.num_all} lines, {self.num_failed} failed; {self.lines_per_s:.2f} a "
            f"second, time left {left}; busy: {self.busy}"
        )

    @property
    def busy(self) -> str:
        return " ".join(f"{name} {share:4.0%}" for name, share in self.shares.items())


class ShowBatch(Protocol):
    """Shows the progress. Called about ten times a second."""

    def __call__(self, progress: BatchProgress, /) -> None: ...


@contextmanager
def batch_bar() -> Iterator[ShowBatch]:
    """Yields a function that shows the progress on stderr: a bar, gone afterwards, or lines."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        TextColumn("lines"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(text_format="", text_format_no_percentage="", show_speed=True),
        TimeRemainingColumn(),
        TextColumn("{task.fields[busy]}"),
    )
    with Progress(*columns, console=console.stderr_console(), transient=True) as bar:
        task = bar.add_task("lines", total=None, busy="")

        def show(progress: BatchProgress) -> None:
            busy = f"{progress.num_failed} failed {progress.busy}" if progress.num_failed else progress.busy
            bar.update(task, completed=progress.num_done, total=progress.num_all, busy=busy)

        yield show


class _Lines:
    """Prints a line each minute."""

    def __init__(self) -> None:
        self._said_s = time.monotonic()

    def __call__(self, progress: BatchProgress) -> None:
        if time.monotonic() - self._said_s >= _LINE_EVERY_S:
            self._said_s = time.monotonic()
            print(progress.line(), file=sys.stderr, flush=True)


class StatusFile:
    """Keeps a JSON file that says how far a run is. A reader never sees half of it."""

    def __init__(self, path: Path) -> None:
        """Writes the first status. Raises RequestError where it cannot be written."""
        self._path = path
        self._written_s = 0.0
        try:
            self.write("starting")
        except OSError as error:
            raise RequestError(
                f"cannot write '{path}': {error.strerror}; name a file in a folder of yours"
            ) from error

    def show(self, progress: BatchProgress) -> None:
        """Writes the progress, about once a second."""
        if time.monotonic() - self._written_s >= _FILE_EVERY_S:
            self.write("running", **asdict(progress), left_s=progress.left_s)

    def write(self, state: str, **fields: Any) -> None:
        """Writes a status. state: starting, running, done, or failed where the run could not go on."""
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps({"state": state, "at_s": round(time.time(), 3), **fields}) + "\n")
        beside.replace(self._path)
        self._written_s = time.monotonic()

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """Writes why a run ended that could not go on."""
        try:
            yield
        except EPDError as error:
            self.write("failed", error=type(error).__name__, message=str(error))
            raise

    @contextmanager
    def told(self, bar: Callable[[], AbstractContextManager[ShowBatch]]) -> Iterator[ShowBatch]:
        """Yields a function that shows the progress in a bar and in the file. bar: opens the bar."""
        with bar() as show:

            def both(progress: BatchProgress) -> None:
                self.show(progress)
                show(progress)

            yield both
