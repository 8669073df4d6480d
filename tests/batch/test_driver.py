"""A run answers or explains every line once, however often it is stopped.

Modules: `epd/batch/summary.py`, `epd/batch/tasks.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.progress import BatchProgress, Done
from epd.batch.result_files import Tally, errors_path
from epd.batch.summary import Hardware, Summary
from epd.batch.tasks import Backend, MediaTask, Outcome
from epd.batch.utilisation import Utilisation
from epd.errors import RequestError, UnavailableError
from tests import ROOT
from tests.batch.fakes import FakeBackend

NUM_LINES = 400
_RUN = """
import sys
from pathlib import Path
from tests.batch.fakes import FakeBackend
from tests.batch.test_driver import run

run(Path(sys.argv[1]), FakeBackend(stops_after=int(sys.argv[2])))
"""


def write_input(folder: Path, num_lines: int = NUM_LINES) -> Path:
    """Lines about ten videos in no order; one in twenty is broken, each in another way."""
    rng = random.Random(0)
    lines = []
    for number in range(num_lines):
        record: dict[str, Any] = {"id": number, "video": f"{rng.randrange(10)}.mp4", "question": f"q{number}"}
        if number % 80 == 7:
            lines.append("{broken")
        elif number % 80 == 27:
            lines.append(json.dumps({**record, "video": f"missing{number}.mp4"}))
        elif number % 40 == 17:
            lines.append(json.dumps({**record, "question": ""}))
        else:
            lines.append(json.dumps({**record, "answer": f"Q{number}." if number % 2 else "other"}))
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(folder: Path, backend: FakeBackend, *, retries_failed: bool = False, **options: Any) -> Summary:
    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        yield backend

    defaults, hardware = LineDefaults(folder), Hardware(engine_tokens_per_s=80.0)
    plan = BatchPlan(folder / "in.jsonl", folder / "out.jsonl", defaults, retries_failed, hardware)
    return run_batch(plan, opened, **options)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_complete(folder: Path, num_lines: int = NUM_LINES) -> None:
    """Every line is answered with its own answer, or explained, once."""
    answered, failed = records(folder / "out.jsonl"), records(folder / "out.errors.jsonl")
    assert all(record["answer"] == f"q{record['id']}" for record in answered)
    numbers = [record["id"] for record in answered]
    numbers += [record["line"] - 1 if record["id"] is None else record["id"] for record in failed]
    assert sorted(numbers) == list(range(num_lines))
    assert {record["line"] - 1 for record in failed} == {
        number for number in range(num_lines) if number % 80 in (7, 27) or number % 40 == 17
    }


def test_a_run_answers_group_by_group_and_sums_up(tmp_path: Path) -> None:
    write_input(tmp_path)
    backend = FakeBackend()
    utilisation = Utilisation()
    shown: list[tuple[int, int]] = []
    summary = run(
        tmp_path,
        backend,
        utilisation=utilisation,
        bar=lambda: nullcontext(lambda progress: shown.append((progress.done.num_lines, progress.num_all))),
    )
    assert_complete(tmp_path)
    tally = summary.tally
    assert (tally.num_answered, tally.num_failed) == (380, 20)
    assert (tally.num_checked, tally.num_right) == (380, sum(number % 2 for number in range(NUM_LINES)) - 20)
    assert summary.num_groups == summary.counts.num_encoded == backend.num_tasks == 15
    assert summary.num_now == NUM_LINES
    assert summary.utilisation.keys() == {"decode", "language"}
    assert shown
    assert all(every == NUM_LINES - 15 for _, every in shown)  # the others are refused before
    assert summary.record()["accuracy"] == pytest.approx(180 / 380)
    assert "380 of 400 lines answered, 20 failed" in summary.lines()[0]


def test_the_summary_has_tokens_a_second_and_the_price_of_lines(tmp_path: Path) -> None:
    tally = Tally(num_answered=40, num_failed=10)
    done = Done(50, 5, video_s=7200.0, answer_tokens=720)
    summary = Summary(50, 0, 5, tally, wall_s=36.0, done=done, hardware=Hardware(2.0, 4, 80.0))
    assert summary.answer_tokens_per_s == pytest.approx(20.0)
    assert summary.price_per_1000 == pytest.approx(2.0 * 0.01 / 50 * 1000)
    assert "720 tokens of answers, 20.0 a second, 25% of the engine alone" in summary.lines()
    assert "2.00 hours of video, 50 in an hour of each device" in summary.lines()
    assert replace(summary, hardware=Hardware()).lines()[2:] == [
        "720 tokens of answers, 20.0 a second",
        "2.00 hours of video, 200 in an hour of the run",
    ]
    assert "1,000 lines cost 0.4 at 2 an hour" in summary.lines()
    assert Summary(50, 50, 0, tally, 1.0, hardware=Hardware(2.0)).price_per_1000 is None
    write_input(tmp_path, 4)
    assert run(tmp_path, FakeBackend(num_tokens=3)).done.answer_tokens == 12


def test_lines_that_failed_are_asked_again_on_request(tmp_path: Path) -> None:
    """A medium that was missing is there now; a line that is broken fails again."""
    good = {"id": 1, "video": "a.mp4", "question": "q"}
    lost = {"id": 2, "video": "missing.mp4", "question": "q"}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(lost)}\n{{broken\n")
    first = run(tmp_path, FakeBackend())
    assert (first.tally.num_answered, first.tally.num_failed) == (1, 2)
    [(kind, reason), (other, _)] = first.main_reasons
    assert {kind, other} == {"MediaNotFoundError", "RequestError"}
    assert reason.num_lines == 1
    assert run(tmp_path, FakeBackend()).num_now == 0

    backend = FakeBackend()
    again = run(tmp_path, backend, retries_failed=True)
    assert (again.num_now, again.num_done_before, again.tally.num_failed) == (2, 1, 2)
    assert backend.asked == [2]
    assert sorted(record["line"] for record in records(tmp_path / "out.errors.jsonl")) == [2, 3]


def test_the_reasons_are_the_most_frequent_ones_and_the_file_is_named(tmp_path: Path) -> None:
    write_input(tmp_path)
    summary = run(tmp_path, FakeBackend())
    first, *reasons = summary.failure_lines(tmp_path / "out.errors.jsonl")
    assert first.startswith(f"20 lines failed, see '{tmp_path / 'out.errors.jsonl'}'; --retry-failed")
    assert [line.split()[:2] for line in reasons] == [["15", "RequestError,"], ["5", "MediaNotFoundError,"]]
    assert "no file at" in reasons[1]
    assert summary.record()["reasons"]["MediaNotFoundError"]["num_lines"] == 5


def test_a_run_that_breaks_off_is_gone_on_with(tmp_path: Path) -> None:
    write_input(tmp_path)
    first, second = FakeBackend(ends_after=100), FakeBackend()
    with pytest.raises(UnavailableError, match="gone"):
        run(tmp_path, first)
    before = (tmp_path / "out.jsonl").read_bytes()
    summary = run(tmp_path, second)
    assert_complete(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert not set(first.asked) & set(second.asked)
    assert summary.num_done_before == NUM_LINES - summary.num_now > 100
    assert summary.tally.num_right == 180


def test_a_run_that_is_done_asks_nobody(tmp_path: Path) -> None:
    write_input(tmp_path)
    run(tmp_path, FakeBackend())
    again = FakeBackend()
    summary = run(tmp_path, again)
    assert (again.num_tasks, summary.num_now, summary.num_done_before) == (0, 0, NUM_LINES)
    assert summary.tally.num_answered == 380


def test_killed_at_any_moment_every_line_is_there_once(tmp_path: Path) -> None:
    write_input(tmp_path)
    rng = random.Random(1)
    for _ in range(3):
        before = lines_written(tmp_path)
        command = [sys.executable, "-c", _RUN, str(tmp_path), str(rng.randrange(30, 90))]
        done = subprocess.run(command, cwd=ROOT, env=_environment(), check=False)
        assert done.returncode == -signal.SIGKILL
        assert before < lines_written(tmp_path) < NUM_LINES
    run(tmp_path, FakeBackend())
    assert_complete(tmp_path)


def lines_written(folder: Path) -> int:
    paths = [folder / "out.jsonl", errors_path(folder / "out.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_results_do_not_go_into_the_input(tmp_path: Path) -> None:
    path = write_input(tmp_path, 3)
    plan = BatchPlan(path, path, LineDefaults(tmp_path))
    with pytest.raises(RequestError, match="is the input"):
        run_batch(plan, lambda _: pytest.fail("nobody is to be asked"))
    assert len(path.read_text().splitlines()) == 3


def test_an_empty_input_is_no_work(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")
    summary = run(tmp_path, FakeBackend())
    assert (summary.num_lines, summary.tally.num_answered) == (0, 0)


def test_the_time_left_is_that_of_the_work_left(tmp_path: Path) -> None:
    """Of four videos the last has ten times the bytes of the others together."""
    sizes = (1000, 1001, 999, 30_000)
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.mp4").write_bytes(b"0" * size)
    lines = [{"id": number, "video": f"{number}.mp4", "question": "q"} for number in range(len(sizes))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown: list[BatchProgress] = []

    class Reading(FakeBackend):
        def busy_s(self) -> Mapping[str, float]:
            return {"decode": sum(sizes[number] for number in self.asked) / 1e6}

        def _outcomes(self, tasks: Iterator[MediaTask]) -> Iterator[Outcome | None]:
            lines = [line for task in tasks for line in task.lines]
            for self.num_in_flight, line in zip((3, 2, 1, 0), lines, strict=True):
                time.sleep(0.15)  # longer than between two looks
                self.asked.append(line.line_id)
                yield self._outcome(line)

    utilisation = Utilisation()
    bar = lambda: nullcontext(shown.append)  # noqa: E731 - as the command gives it
    summary = run(tmp_path, Reading(num_tokens=20), bar=bar, utilisation=utilisation)
    last = [each for each in shown if each.done.num_lines == 3][-1]
    assert last.left_s == pytest.approx(10 * last.wall_s)
    assert last.efficiency == pytest.approx(60 / last.wall_s / 80)
    assert summary.efficiency == pytest.approx(80 / summary.wall_s / 80)
    assert (last.done.num_media, last.done.num_bytes, last.num_all) == (3, 3000, 4)
    assert shown[-1].left_s == 0
    assert [each.num_in_flight for each in shown] == [3, 2, 1, 0]
    assert [sample.num_in_flight for sample in utilisation.samples] == [3, 2, 1, 0]
