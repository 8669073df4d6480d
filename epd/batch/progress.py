"""Shows a run: as a bar on a terminal, as a line each minute elsewhere, and as JSON in a file."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
)
from rich.table import Column

from epd import console
from epd.batch.line_index import LineGroup
from epd.batch.tasks import Answered, Outcome
from epd.errors import EPDError, RequestError

_LINE_EVERY_S = 60.0
_FILE_EVERY_S = 1.0


@dataclass(slots=True)
class Done:
    """Sums up the lines of a run that have ended. Each line has an equal share of its media.

    num_media: sets of media. num_bytes, video_s: of media, where known. answer_tokens: of answers.
    """

    num_lines: int = 0
    num_media: float = 0.0
    num_bytes: float = 0.0
    video_s: float = 0.0
    answer_tokens: int = 0

    def add(self, group: LineGroup, outcome: Outcome) -> None:
        """Adds a line of a group."""
        self.num_lines += 1
        self.num_media += group.has_media / group.num_lines
        self.num_bytes += group.num_bytes / group.num_lines
        if isinstance(outcome, Answered):
            self.video_s += outcome.amount("epd", "video_s") / group.num_lines
            self.answer_tokens += int(outcome.amount("usage", "completion_tokens"))


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Says how far a run is.

    done: of the num_all lines that this run asks. num_in_flight: lines that are being asked.
    failures: lines in the file of failures, by the name of the error.
    wall_s: since the model was loaded. left_s: predicted from the work that is left, None before any is done.
    shares: lines at work in each stage, the mean of the last seconds.
    efficiency: tokens of answers a second over those of the engine alone, None where not known.
    """

    done: Done
    num_all: int
    num_in_flight: int
    failures: Mapping[str, int]
    wall_s: float
    left_s: float | None
    shares: Mapping[str, float]
    efficiency: float | None = None

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def video_hours(self) -> float:
        return self.done.video_s / 3600

    @property
    def lines_per_s(self) -> float:
        return self.done.num_lines / max(self.wall_s, 1e-6)

    @property
    def tokens_per_s(self) -> float:
        return self.done.answer_tokens / max(self.wall_s, 1e-6)

    def line(self) -> str:
        """Returns the progress for people."""
        left = "unknown" if self.left_s is None else f"{self.left_s / 60:.0f} min"
        return (
            f"{self.done.num_lines} of {self.num_all} lines, {self.shown_failures}; {self.lines_per_s:.2f} a "
            f"second, time left {left}; {self.work}; lines at work: {self.at_work}"
        )

    def record(self) -> dict[str, Any]:
        """Returns the progress for programs."""
        return {
            "num_done": self.done.num_lines,
            "num_all": self.num_all,
            "num_in_flight": self.num_in_flight,
            "num_failed": self.num_failed,
            "failures": dict(self.failures),
            "num_media": round(self.done.num_media, 2),
            "video_hours": round(self.video_hours, 4),
            "lines_per_s": round(self.lines_per_s, 3),
            "answer_tokens_per_s": round(self.tokens_per_s, 3),
            "efficiency": self.efficiency,
            "left_s": self.left_s,
            "shares": dict(self.shares),
        }

    @property
    def shown_failures(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.failures.items())
        return f"{self.num_failed} failed ({kinds})" if kinds else "0 failed"

    @property
    def work(self) -> str:
        """Returns what was worked on, for people."""
        share = "" if self.efficiency is None else f" ({self.efficiency:.0%} of the engine alone)"
        rate = f"{self.tokens_per_s:.1f} tokens/s{share}"
        return f"{self.done.num_media:.0f} media, {self.video_hours:.2f} h of video, {rate}"

    @property
    def at_work(self) -> str:
        return ", ".join(f"{name} {number:.1f}" for name, number in self.shares.items())


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
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[work]}", table_column=Column()),  # goes on in the next line
    )
    with Progress(*columns, console=console.stderr_console(), transient=True) as bar:
        task = bar.add_task("lines", total=None, left="", work="")

        def show(progress: BatchProgress) -> None:
            failed = f"{progress.shown_failures}, " if progress.failures else ""
            left = "" if progress.left_s is None else f"{timedelta(seconds=round(progress.left_s))} left"
            work = f"{failed}{progress.work}, at work: {progress.at_work}"
            bar.update(task, completed=progress.done.num_lines, total=progress.num_all, left=left, work=work)

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
            self.write("running", **progress.record())

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
