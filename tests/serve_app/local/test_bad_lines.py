"""Lines that are no requests fail alone in all three ways to answer a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.http_backend import HttpBackend
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults
from epd.batch.tasks import Backend
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.local.own_batch import OwnBackend
from tests.batch.bad_lines import DRAWN_LINES, bad_lines
from tests.serve_app.conftest import Front
from tests.serve_app.files.test_batches import CHAT, FINAL
from tests.serve_app.server import wait_until

# Of 40 to 60 lines each, for each of three ways: ten thousand lines at least in `make soak`.
NUM_EXAMPLES = 250 if "EPD_SOAK" in os.environ else 3
Answer = Callable[[list[bytes]], tuple[list[Any], list[Any]]]


def good(number: int) -> bytes:
    body = {"messages": [{"role": "user", "content": f"What is {number}?"}], "max_tokens": 2}
    return json.dumps({"custom_id": f"good {number}", "method": "POST", "url": CHAT, "body": body}).encode()


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def batch(folder: Path, open_backend: Callable[[LineIndex], Any]) -> Answer:
    """`epd batch`, over a backend. Each call has new files."""

    def answer(lines: list[bytes]) -> tuple[list[Any], list[Any]]:
        for path in folder.glob("*.jsonl"):
            path.unlink()
        (folder / "in.jsonl").write_bytes(b"\n".join(lines))
        plan = BatchPlan(folder / "in.jsonl", folder / "out.jsonl", LineDefaults(folder, max_tokens=2))
        run_batch(plan, open_backend)
        return records(folder / "out.jsonl"), records(folder / "out.errors.jsonl")

    return answer


def of_server(front: Front) -> Answer:
    """`/v1/batches`."""

    def answer(lines: list[bytes]) -> tuple[list[Any], list[Any]]:
        client = front.openai
        file = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(made.id).status in FINAL)
        done = client.batches.retrieve(made.id)
        assert done.status == "completed", done.errors
        found = [
            client.files.content(each).content.splitlines() if each else ()
            for each in (done.output_file_id, done.error_file_id)
        ]
        answered, failed = ([json.loads(line) for line in each] for each in found)
        return answered, failed

    return answer


@pytest.fixture(params=["one process", "--url", "/v1/batches"])
def answer(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    backend: OwnBackend,
    run_front: Callable[..., Front],
) -> Answer:
    if request.param == "one process":
        return batch(tmp_path, lambda _: nullcontext(backend))
    front = run_front(files=FileSettings(tmp_path / "kept"))
    if request.param == "/v1/batches":
        return of_server(front)

    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        with HttpBackend.open(front.server.url, None) as asked:
            yield asked

    return batch(tmp_path, opened)


def test_a_bad_line_of_every_kind_fails_alone(answer: Answer) -> None:
    bad = bad_lines(is_openai=True)
    lines = [good(0), good(1)]
    for number, (line, _, _) in enumerate(bad.values(), start=2):
        lines += [line, good(number)]
    answered, failed = answer(lines)
    assert sorted(each["custom_id"] for each in answered) == sorted(
        json.loads(line)["custom_id"] for line in [good(0), good(1), *lines[3::2]]
    )
    assert len(failed) == len(bad)
    for place, (line, words, line_id) in enumerate(bad.values()):
        number = 3 + 2 * place
        (error,) = [
            each
            for each in failed
            if (each.get("custom_id", each.get("id")) == line_id if line_id else each.get("line") == number)
        ]
        message = error["error"]["message"]
        assert words in message or "no field" in message or "no custom_id" in message, (line[:50], message)
        assert error["error"].get("type", error["error"].get("code")) == "RequestError"


@given(lines=DRAWN_LINES)
@settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
def test_drawn_lines_leave_the_others_their_answers(answer: Answer, lines: list[bytes]) -> None:
    answered, failed = answer([good(0), *lines[::2], good(1), *lines[1::2], good(2)])
    names = {str(each.get("custom_id", each.get("id"))) for each in answered}
    assert {"good 0", "good 1", "good 2"} <= names
    blank = sum(not line.removeprefix(b"\xef\xbb\xbf").strip() for line in lines)
    assert len(answered) + len(failed) == len(lines) + 3 - blank
