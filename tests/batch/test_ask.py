"""Datasets of Ray Data are asked about, row by row, without one that holds up others.

Ray runs in a process of its own: `tests/batch/ray_data_job.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from epd.batch.ask import AskVideos, ask_videos
from epd.batch.lines import LineDefaults
from epd.client.endpoint import parse_endpoints
from epd.errors import RequestError
from tests import ROOT
from tests.batch.parquet import write_table
from tests.batch.test_http_backend import KEY, FakeServer, serving
from tests.ports import kept_port
from tests.test_how_to import HOW_TO, python_blocks

NUM_ROWS = 60


def rows_of(
    server: FakeServer,
    rows: list[dict[str, Any]],
    *asked: str,
    note: Callable[[int], None] = lambda _: None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """Returns the results in the order in which they come. note: gets their number at each."""
    endpoints = parse_endpoints([server.url], api_key=KEY)
    actor = AskVideos(endpoints, asked, LineDefaults(Path("/"), **fields), media_in_flight=4)

    async def answered() -> list[dict[str, Any]]:
        found = list[dict[str, Any]]()
        async for table in actor(pa.Table.from_pylist(rows)):
            found += table.to_pylist()
            note(len(found))
        await actor.close()
        return found

    return asyncio.run(answered())


def test_each_row_becomes_a_row_for_each_question() -> None:
    rows = [
        {"id": "a", "video": "https://h/a.mp4", "who": "Ann"},
        {"id": None, "video": "https://h/b.mp4", "who": "Bob"},
    ]
    with serving(FakeServer(pause_s=0.0)) as server:
        found = rows_of(server, rows, "Where is {who}?", "Why?", fps=2)
    assert {(row["id"], row["uri"], row["answer"]) for row in found} == {
        ("a#1", "https://h/a.mp4", "Where is Ann?"),
        ("a#2", "https://h/a.mp4", "Why?"),
        ("https://h/b.mp4#1", "https://h/b.mp4", "Where is Bob?"),
        ("https://h/b.mp4#2", "https://h/b.mp4", "Why?"),
    }
    assert server.options == [{"fps": 2}] * 4


def test_rows_that_cannot_be_asked_are_explained() -> None:
    rows = [
        {"id": "a", "video": None, "question": "q", "questions": None},
        {"id": "b", "video": "https://h/b.mp4", "question": None, "questions": ["", "q"]},
    ]
    with serving(FakeServer(pause_s=0.0)) as server:
        found = {row["id"]: row for row in rows_of(server, rows)}
    assert found.keys() == {"a", "b#1", "b#2"}
    assert [found[key]["error"]["type"] for key in ("a", "b#1")] == ["RequestError"] * 2
    assert found["b#2"]["answer"] == "q"


def test_a_server_that_is_lost_is_an_error_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.batch.http_backend._FIRST_PAUSE_S", 0.001)
    with kept_port() as port:
        nobody = FakeServer(url=f"http://127.0.0.1:{port}")
        [row] = rows_of(nobody, [{"id": 1, "video": "https://h/a.mp4", "question": "q"}])
    assert (row["id"], row["error"]["type"], row["error"]["status"]) == ("1", "UnavailableError", 503)


def test_a_long_video_holds_up_no_other() -> None:
    """The others are all answered while the server holds it; a place for media is all that it has."""
    free = threading.Event()

    def answer(question: str) -> Any:
        if question == "long":
            free.wait()
        return 200, {"choices": [{"message": {"content": question}, "finish_reason": "stop"}]}

    server = FakeServer(answer, pause_s=0.0)
    rows = [{"video": f"https://h/{n}.mp4", "question": "long" if n == 3 else "q"} for n in range(NUM_ROWS)]

    def note(num_found: int) -> None:
        if num_found == NUM_ROWS - 1:
            free.set()

    with serving(server):
        found = rows_of(server, rows, note=note)
    assert found[-1]["question"] == "long"
    assert len(found) == NUM_ROWS


def test_fields_that_are_none_are_named() -> None:
    with pytest.raises(RequestError, match="speed"):
        ask_videos(None, url="http://h", fields={"speed": 3})


def test_a_dataset_goes_from_parquet_to_parquet(tmp_path: Path) -> None:
    """The pipeline of the how-to, but for its places and the number of its actors.

    Columns that nobody asks for do not reach the actors; each row is there once.
    """
    *_, (_, program) = python_blocks(HOW_TO / "answer-on-a-cluster.md")
    rows = [
        {"id": n, "video": f"https://h/{n}.mp4", "question": f"q{n}", "blob": b"x" * 1000}
        for n in range(NUM_ROWS)
    ]
    for part in range(3):
        write_table(tmp_path / f"in/{part}.parquet", rows[part::3])
    with serving(FakeServer(pause_s=0.0)) as server:
        for place, ours in (
            ("rows.parquet", str(tmp_path / "in")),
            ("http://10.0.0.5:8000", server.url),
            ("SECRET", KEY),
            ("size=4", "size=2"),
            ('"answers"', f'"{tmp_path / "out"}"'),
        ):
            assert place in program
            program = program.replace(place, ours)
        done = subprocess.run(
            [sys.executable, "-m", "tests.batch.ray_data_job", program, str(tmp_path / "out")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_raylet_start_wait_time_s": "300"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = pq.read_table(tmp_path / "out").to_pylist()
    assert sorted(int(row["id"]) for row in found) == list(range(NUM_ROWS))
    assert all(row["answer"] == f"q{row['id']}" for row in found)
    assert "blob" not in json.loads(done.stdout.splitlines()[-1])
    assert server.options == [{"fps": 1}] * NUM_ROWS
