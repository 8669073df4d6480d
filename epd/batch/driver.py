"""Drives a run of `epd batch`: index, skip finished lines, order, ask, write, sum up.

    IN.jsonl -> LineIndex -> groups in a good order -> Backend -> outcomes -> OUT.jsonl, OUT.errors.jsonl

Only lines in work are in memory. Everything written before a kill is left out of the next run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from epd.batch.in_flight import CostModel, in_busy_order
from epd.batch.line_index import LineGroup, LineIndex
from epd.batch.lines import JSON, BatchLine, LineDefaults
from epd.batch.progress import BatchProgress, Done, ShowBatch
from epd.batch.records import error_record, result_record
from epd.batch.result_files import ResultFiles, Results, errors_path
from epd.batch.result_parts import PartsFolder, ResultParts
from epd.batch.summary import Hardware, Summary, peak_bytes
from epd.batch.tasks import Answered, Backend, MediaTask, Outcome
from epd.batch.utilisation import Utilisation
from epd.errors import RequestError

_SAMPLE_S = 0.1
_CHUNK = 256

# Starts the backend when the first line needs it.
OpenBackend = Callable[[LineIndex], AbstractContextManager[Backend]]
# Bars, open one after the other: a terminal shows one at a time.
IndexingBar = Callable[[], AbstractContextManager[Callable[[int, int], None]]]
BatchBar = Callable[[], AbstractContextManager[ShowBatch]]


def no_bar() -> AbstractContextManager[Callable[..., None]]:
    return nullcontext(lambda *_: None)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Plans a run. source: the lines. defaults: for fields that lines leave out.

    out: the file of results, or the folder of its parts in Parquet.
    retries_failed: whether lines that failed in earlier runs are asked again.
    hardware: that answers, as far as it is known.
    """

    source: Path
    out: Path | PartsFolder
    defaults: LineDefaults
    retries_failed: bool = False
    hardware: Hardware = field(default_factory=Hardware)

    def check(self) -> None:
        """Raises RequestError when results would be written into the input."""
        if isinstance(self.out, PartsFolder):
            return
        for path in (self.out, errors_path(self.out)):
            if path.exists() and self.source.exists() and path.samefile(self.source):
                raise RequestError(f"'{path}' is the input; name another file for the results")

    def open_results(self) -> Results:
        """Raises RequestError for results that cannot be written, or that another run writes."""
        return ResultParts(self.out) if isinstance(self.out, PartsFolder) else ResultFiles(self.out)


def run_batch(
    plan: BatchPlan,
    open_backend: OpenBackend,
    *,
    indexing_bar: IndexingBar = no_bar,
    bar: BatchBar = no_bar,
    utilisation: Utilisation | None = None,
) -> Summary:
    """Answers or explains every line that no earlier run has. utilisation: filled during the run.

    Raises EPDError for an unusable input or output, and when no further line can be answered.
    """
    plan.check()
    with closing(LineIndex(plan.source, plan.defaults)) as index, closing(plan.open_results()) as files:
        with indexing_bar() as show_indexing:
            index.build(show_indexing)
        if plan.retries_failed:
            files.forget_failed()
        run = _BatchRun(index, files, utilisation or Utilisation(), plan.hardware)
        run.explain_refused()
        if index.has_questions:
            with open_backend(index) as backend, bar() as show:
                return run.answer_all(backend, show)
        return run.summary(None)


class _BatchRun:
    """Runs over an index that is built."""

    def __init__(
        self, index: LineIndex, files: Results, utilisation: Utilisation, hardware: Hardware
    ) -> None:
        self._index = index
        self._files = files
        self._utilisation = utilisation
        self._hardware = hardware
        self._num_lines = index.num_lines
        self._num_done_before = index.forget(files.done())
        self._num_groups = index.num_groups
        self._num_asked = index.num_lines
        self._num_bytes = index.num_bytes
        self._costs = CostModel()
        self._done = Done()
        self._taken: dict[int, LineGroup] = {}  # groups of lines without an outcome, by their numbers
        self._start_s = time.monotonic()
        self._sampled_s = 0.0

    def explain_refused(self) -> None:
        for chunk in _chunks(error_record(line) for line in self._index.refused()):
            self._files.add([], chunk)
            self._num_asked -= len(chunk)

    def answer_all(self, backend: Backend, show: ShowBatch) -> Summary:
        self._start_s = time.monotonic()
        with backend.run(self._tasks(backend.max_tasks)) as outcomes:
            for outcome in outcomes:
                if outcome is not None:
                    self._write(outcome)
                self._watch(backend, show, is_warm=isinstance(outcome, Answered))
        return self.summary(backend)

    def _tasks(self, max_tasks: int) -> Iterator[MediaTask]:
        """Yields tasks to the backend's threads, one at a time."""
        for group in in_busy_order(self._index.groups(), self._costs, max_tasks=max_tasks):
            yield MediaTask(group.first, self._lines(group))

    def _lines(self, group: LineGroup) -> Iterator[BatchLine]:
        """Yields the lines of a group."""
        for line in self._index.lines(group):
            self._taken[line.number] = group
            yield line

    def _write(self, outcome: Outcome) -> None:
        if isinstance(outcome, Answered):
            self._files.add([result_record(outcome)], [])
        else:
            self._files.add([], [error_record(outcome)])
        self._done.add(self._taken.pop(outcome.line.number), outcome)

    def _watch(self, backend: Backend, show: ShowBatch, *, is_warm: bool) -> None:
        """Samples the work in stages at intervals, and shows it."""
        now_s = time.monotonic()
        if is_warm:
            self._utilisation.mark_warm(now_s, backend.busy_s())
        if now_s - self._sampled_s < _SAMPLE_S:
            return
        self._sampled_s = now_s
        busy_s = backend.busy_s()
        self._costs.learn(busy_s, self._done.num_bytes, self._done.num_lines)
        self._utilisation.add(now_s, busy_s, backend.num_in_flight)
        shares = self._utilisation.recent(now_s, busy_s)
        show(self._progress(now_s, backend.num_in_flight, shares))

    def _progress(self, now_s: float, num_in_flight: int, shares: Mapping[str, float]) -> BatchProgress:
        wall_s, reasons = now_s - self._start_s, self._files.tally.reasons
        return BatchProgress(
            done=replace(self._done),
            num_all=self._num_asked,
            num_in_flight=num_in_flight,
            failures={kind: reason.num_lines for kind, reason in reasons.items()},
            wall_s=wall_s,
            left_s=self._left_s(wall_s),
            shares=shares,
            efficiency=self._hardware.efficiency(self._done.answer_tokens / wall_s) if wall_s > 0 else None,
        )

    def _left_s(self, wall_s: float) -> float | None:
        """Predicts the seconds left by the work that is left, by lines where no costs are known."""
        work_s = self._costs.work_s
        done = work_s(self._done.num_bytes, self._done.num_lines) or self._done.num_lines
        left = work_s(self._num_bytes, self._num_asked) or self._num_asked
        return wall_s * (left - done) / done if done else None

    def summary(self, backend: Backend | None) -> Summary:
        now_s = time.monotonic()
        answered = Summary(
            num_lines=self._num_lines,
            num_done_before=self._num_done_before,
            num_groups=self._num_groups,
            tally=self._files.tally,
            wall_s=now_s - self._start_s,
            peak_bytes=peak_bytes(),
            done=self._done,
            hardware=self._hardware,
        )
        if backend is None:
            return answered
        shares = self._utilisation.shares(now_s, backend.busy_s())
        return replace(answered, counts=backend.counts(), utilisation=shares)


def _chunks(records: Iterable[JSON]) -> Iterator[list[JSON]]:
    remaining = iter(records)
    while chunk := list(islice(remaining, _CHUNK)):
        yield chunk
