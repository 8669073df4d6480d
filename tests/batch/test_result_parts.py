"""Every line has one row, in parts that a manifest names, whenever a run is killed or a store fails."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from epd.batch import places
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.line_index import LineIndex
from epd.batch.lines import CHAT_URL, BatchLine, LineDefaults, parse_line
from epd.batch.records import result_record
from epd.batch.result_parts import PartsFolder, ResultParts
from epd.batch.summary import Summary
from epd.batch.tasks import Answered, Backend, Failed, Outcome
from epd.errors import RequestError, StorageFullError, UnavailableError
from tests import ROOT
from tests.batch.fakes import FakeBackend, completion
from tests.batch.parquet import committed_rows
from tests.batch.test_driver import NUM_LINES, write_input

# Kills itself at the write of a file that it is told, before, in the middle, or after it.
_KILLED = """
import os, signal, sys
from pathlib import Path
from epd.batch import places
from tests.batch.fakes import FakeBackend
from tests.batch.test_result_parts import run

left, moment, write = int(sys.argv[2]), sys.argv[3], places.Folder.write

def killing(folder, name, data):
    global left
    left -= 1
    if left == 0 and moment == "within":
        Path(folder.at("." + name)).write_bytes(bytes(data)[:10])
    if left > 0 or moment == "after":
        write(folder, name, data)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

places.Folder.write = killing
run(Path(sys.argv[1]), FakeBackend(), max_rows=23)
"""


def run(folder: Path, backend: FakeBackend, *, retries_failed: bool = False, **options: Any) -> Summary:
    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        yield backend

    out = PartsFolder(str(folder / "out"), **options)
    return run_batch(BatchPlan(folder / "in.jsonl", out, LineDefaults(folder), retries_failed), opened)


@dataclass
class Weak(FakeBackend):
    """Cannot answer some ids for now. fails: by id, the status."""

    fails: dict[Any, int] = field(default_factory=dict)

    def _outcome(self, line: BatchLine) -> Outcome:
        if line.line_id in self.fails:
            return Failed(line, "SomeError", f"try {self.num_tasks}", self.fails[line.line_id])
        return super()._outcome(line)


def assert_once(folder: Path) -> list[dict[str, Any]]:
    """Each line of `write_input` has one row, and no other part lies in the folder."""
    rows = committed_rows(folder / "out")
    assert all(row["answer"] == f"q{row['id']}" for row in rows if row["error"] is None)
    numbers = [row["line"] - 1 if row["id"] is None else int(row["id"]) for row in rows]
    assert sorted(numbers) == list(range(NUM_LINES))
    assert len(pq.read_table(folder / "out")) == NUM_LINES
    return rows


def test_a_run_writes_one_table_of_answers_and_failures(tmp_path: Path) -> None:
    write_input(tmp_path)
    summary = run(tmp_path, FakeBackend(), max_rows=150)
    assert (summary.tally.num_answered, summary.tally.num_failed) == (380, 20)
    rows = assert_once(tmp_path)
    answered = next(row for row in rows if row["id"] == "0")
    assert answered["uri"] == str(tmp_path / Path(answered["uri"]).name)
    assert (answered["question"], answered["finish_reason"], answered["error"]) == ("q0", "stop", None)
    lost = next(row for row in rows if row["id"] == "27")
    assert (lost["error"]["type"], lost["error"]["status"], lost["error"]["attempts"]) == (
        "MediaNotFoundError", 400, 1
    )  # fmt: skip
    again = FakeBackend()
    summary = run(tmp_path, again)
    assert (again.asked, summary.num_now, summary.tally.num_right) == ([], 0, 180)
    assert summary.record()["reasons"]["MediaNotFoundError"]["num_lines"] == 5


def test_killed_at_drawn_writes_every_line_is_there_once(tmp_path: Path) -> None:
    write_input(tmp_path)
    rng = random.Random(5)
    for _ in range(4):
        moment = rng.choice(["before", "within", "after"])
        command = [sys.executable, "-c", _KILLED, str(tmp_path), str(rng.randrange(1, 12)), moment]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        assert done.returncode == -signal.SIGKILL
        if (tmp_path / "out/_manifest.json").exists():
            keys = [row["key"] for row in committed_rows(tmp_path / "out")]
            assert len(set(keys)) == len(keys)
    run(tmp_path, FakeBackend())
    assert_once(tmp_path)


def test_a_line_is_asked_in_later_runs_until_it_is_in_quarantine(tmp_path: Path) -> None:
    """One that the server could not answer: one that is wrong itself is there at once."""
    records = [{"id": number, "video": "a.mp4", "question": f"q{number}"} for number in range(4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    asked = []
    for fails in ({1: 503, 2: 503, 3: 422}, {1: 503}, {1: 503}, {}):
        backend = Weak(fails=fails)
        run(tmp_path, backend, max_attempts=3)
        asked.append(backend.asked)
    assert asked == [[0, 1, 2, 3], [1, 2], [1], []]
    rows = {row["id"]: row for row in committed_rows(tmp_path / "out")}
    assert {key: row["error"] and row["error"]["attempts"] for key, row in rows.items()} == {
        "0": None, "1": 3, "2": None, "3": 1
    }  # fmt: skip
    backend = Weak()
    summary = run(tmp_path, backend, retries_failed=True)
    assert (backend.asked, summary.tally.num_answered, summary.tally.num_failed) == ([1, 3], 4, 0)
    rows = {row["id"]: row for row in committed_rows(tmp_path / "out")}
    assert [row["error"] for row in rows.values()] == [None] * 4
    assert not list((tmp_path / "out").glob("failed-*"))


def test_a_retry_that_breaks_off_loses_no_failure(tmp_path: Path) -> None:
    """Those that were not asked again stay explained, with their attempts."""
    records = [{"id": number, "video": f"{number}.mp4", "question": "q"} for number in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    run(tmp_path, Weak(fails=dict.fromkeys(range(6), 503)))
    with pytest.raises(UnavailableError):
        run(tmp_path, Weak(ends_after=2), max_rows=1)
    rows = committed_rows(tmp_path / "out")
    assert sorted(row["id"] for row in rows) == list("012345")
    assert sum(row["error"] is None for row in rows) == 2
    backend = Weak()
    run(tmp_path, backend)
    assert len(backend.asked) == 4


def test_a_disk_that_fails_keeps_what_the_manifest_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path)
    left, write = 7, places.Folder.write

    def failing(folder: places.Folder, name: str, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")
        write(folder, name, data)

    monkeypatch.setattr(places.Folder, "write", failing)
    with pytest.raises(StorageFullError, match="No space left"):
        run(tmp_path, FakeBackend(), max_rows=20)
    run(tmp_path, FakeBackend(), max_rows=20)
    assert_once(tmp_path)


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    out = PartsFolder(str(tmp_path / "out"))
    with closing(ResultParts(out)), pytest.raises(RequestError, match="another run writes"):
        ResultParts(out)


def test_a_run_ends_where_another_has_begun(tmp_path: Path) -> None:
    """As in an object store, which has no locks: the manifest names the run that may write."""
    parts = ResultParts(PartsFolder(str(tmp_path / "out")))
    path = tmp_path / "out/_manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run": 2}))
    parts.add([{"id": "a", "answer": "x"}], [])
    with pytest.raises(RequestError, match="run 2 writes to"):
        parts.close()
    assert json.loads(path.read_text())["parts"] == []


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Of Python's own objects; `benchmarks/serving/batch_memory.py` measures the process."""
    peaks = []
    for num_lines in (20, 100, 1000):  # the first imports what is used
        folder = tmp_path / str(num_lines)
        folder.mkdir()
        write_input(folder, num_lines)
        tracemalloc.start()
        run(folder, FakeBackend(), max_rows=25)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(committed_rows(folder / "out")) == num_lines
    _, few, many = peaks
    assert many < 1.5 * few + 1000 * 64, "the fake remembers the ids"


def test_an_answer_in_json_has_a_column_of_its_own(tmp_path: Path) -> None:
    answers = {"a": '{"n": 1}', "b": " [1, 2]", "c": '{"n": ', "d": "three", "e": "3"}
    with closing(ResultParts(PartsFolder(str(tmp_path / "out")))) as parts:
        parts.add([{"id": key, "answer": answer} for key, answer in answers.items()], [])
    found = {row["id"]: row["json"] for row in committed_rows(tmp_path / "out")}
    assert found == {"a": '{"n":1}', "b": "[1,2]", "c": None, "d": None, "e": None}


@pytest.mark.parametrize("form", ["short", "openai"])
def test_frames_that_were_looked_at_are_columns(tmp_path: Path, form: str) -> None:
    """A server that is not ours does not say them."""
    records = [
        {"id": 1, "video": "a.mp4", "question": "q"},
        {
            "custom_id": "1",
            "method": "POST",
            "url": CHAT_URL,
            "body": {"messages": [{"role": "user", "content": "q"}]},
        },
    ]
    line = parse_line(json.dumps(records[form == "openai"]).encode(), 1, LineDefaults(tmp_path))
    spans = [{"stage": "probe"}, *({"stage": "probe", "frame_times_s": each} for each in ([0.5, 1.5], [2.0]))]
    report = {"frames": 12, "video_s": 6.0, "substituted_frames": 1, "events": spans}
    told = completion("x") | {"epd": report, "model": "m", "system_fingerprint": "12ab"}
    with closing(ResultParts(PartsFolder(str(tmp_path / "out")))) as parts:
        parts.add([result_record(Answered(line, each)) for each in (told, completion("x"))], [])
    names = ("frames", "video_s", "substituted_frames", "frame_times_s", "model", "model_digest")
    found = [[row[name] for name in names] for row in committed_rows(tmp_path / "out")]
    assert found == [[12, 6.0, 1, [0.5, 1.5, 2.0], "m", "12ab"], [None] * 6]


def test_a_file_that_is_no_manifest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "_manifest.json").write_text("[]")
    with pytest.raises(RequestError, match="is no manifest"):
        ResultParts(PartsFolder(str(tmp_path)))
    assert (tmp_path / "_manifest.json").read_text() == "[]"
