"""Batches over HTTP: what the official client sees, and what a line can and cannot do."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from epd.errors import OverloadedError
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.http.api import ApiSettings
from epd.serve_app.service import AnswerItem, AnswerRequest
from tests.serve_app.conftest import QUESTION, Front, running_front
from tests.serve_app.fakes import FakeService
from tests.serve_app.server import wait_until

RunFront = Callable[..., Front]
CHAT = "/v1/chat/completions"
FINAL = {"completed", "failed", "cancelled", "expired"}


def line(name: str, url: str = CHAT, **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {**QUESTION, **more}}


def text_of(lines: list[Any]) -> bytes:
    return b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)


def asked(client: openai.OpenAI, lines: list[Any], **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", text_of(lines)), purpose="batch")
    options: Any = {"endpoint": CHAT, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file.id, **options)


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in FINAL)
    return client.batches.retrieve(batch.id)


def records(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    text = client.files.content(file_id).text if file_id else ""
    return [json.loads(each) for each in text.splitlines()]


def test_the_official_client_gets_a_batch_with_three_bad_lines(run_front: RunFront, tmp_path: Path) -> None:
    front = run_front(files=FileSettings(tmp_path / "kept"), api_key="none")
    client = front.openai
    good = [line(f"good {number}", priority=-5 if number == 7 else None) for number in range(47)]
    bad = [line("temperature", temperature="hot"), line("other", url="/v1/embeddings"), b"{no json"]
    batch = asked(client, [*good[:20], *bad, *good[20:]], metadata={"of": "me"})
    assert (batch.status, batch.metadata, batch.object) == ("validating", {"of": "me"}, "batch")
    done = ended(client, batch)
    assert (done.status, done.errors) == ("completed", None)
    counts = done.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (50, 47, 3)
    answers = records(client, done.output_file_id)
    assert sorted(each["custom_id"] for each in answers) == sorted(each["custom_id"] for each in good)
    for each in answers:
        assert each["response"]["status_code"] == 200
        assert each["response"]["body"]["object"] == "chat.completion"
        assert each["error"] is None
    errors = {each["custom_id"]: each for each in records(client, done.error_file_id)}
    assert set(errors) == {"temperature", "other", None}
    assert {each["response"]["status_code"] for each in errors.values()} == {400}
    assert {request.priority for request in front.service.requests} == {1}, "others come first"
    assert [each.id for each in client.batches.list()] == [batch.id]
    results = [each for each in client.files.list() if each.purpose == "batch_output"]
    assert {each.id for each in results} == {done.output_file_id, done.error_file_id}


def test_prompts_are_continued_in_batches_too(run_front: RunFront, tmp_path: Path) -> None:
    client = run_front(files=FileSettings(tmp_path / "kept")).openai
    url = "/v1/completions"
    asking = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "shapes-vl", "prompt": "so"}}
    done = ended(client, asked(client, [asking, line("b")], endpoint=url))
    (answer,), (error,) = records(client, done.output_file_id), records(client, done.error_file_id)
    assert (answer["custom_id"], answer["response"]["body"]["object"]) == ("a", "text_completion")
    assert error["custom_id"] == "b"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([json.dumps([line("a")]).encode()], "holds a JSON array"),
        ([json.dumps(line("a")).encode("utf-16")], "is UTF-16"),
        ([b" "], "no lines"),
        ([line(str(number)) for number in range(9)], "more than 8 lines"),
    ],
)
def test_files_that_cannot_be_a_batch_fail_it(
    run_front: RunFront, tmp_path: Path, lines: list[Any], says: str
) -> None:
    front = run_front(files=FileSettings(tmp_path / "kept", max_lines=8, max_line_bytes=2000))
    done = ended(front.openai, asked(front.openai, lines))
    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    message = str(done.errors.data[0].message)
    assert says in message
    assert str(tmp_path) not in message
    assert not front.service.requests


def test_a_line_too_long_and_an_id_twice_fail_alone(run_front: RunFront, tmp_path: Path) -> None:
    client = run_front(files=FileSettings(tmp_path / "kept", max_line_bytes=2000)).openai
    done = ended(client, asked(client, [line("a"), line("long", user="x" * 3000), line("a"), line("b")]))
    assert done.status == "completed"
    assert sorted(each["custom_id"] for each in records(client, done.output_file_id)) == ["a", "b"]
    long, twice = records(client, done.error_file_id)
    assert (long["custom_id"], twice["custom_id"], twice["line"]) == ("long", None, 3)
    assert "more than 2000 bytes" in long["error"]["message"]
    assert 'the id "a" of line 1' in twice["error"]["message"]


def test_a_cancelled_batch_keeps_what_was_answered(run_front: RunFront, tmp_path: Path) -> None:
    front = run_front(FakeService(word_s=0.05), files=FileSettings(tmp_path / "kept", num_in_flight=2))
    client = front.openai
    batch = asked(client, [line(str(number)) for number in range(500)])
    wait_until(lambda: len(front.service.requests) > 6)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled"
    assert done.cancelled_at is not None
    answers = records(client, done.output_file_id)
    assert 0 < len(answers) < 100
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)


def test_a_batch_whose_file_is_gone_keeps_what_was_answered(tmp_path: Path) -> None:
    settings = ApiSettings(files=FileSettings(tmp_path / "kept", num_in_flight=2))
    with running_front(FakeService(word_s=0.05), settings, is_left_busy=True) as front:
        batch = asked(front.openai, [line(str(number)) for number in range(500)])
        results = tmp_path / "kept" / "batches" / batch.id / "results.jsonl"
        wait_until(lambda: results.exists() and results.read_bytes().count(b"\n") > 6)
        front.openai.files.delete(batch.input_file_id)
    with running_front(FakeService(), settings) as front:
        done = ended(front.openai, batch)
        assert done.status == "failed"
        assert done.errors is not None
        assert done.errors.data is not None
        assert "upload it again" in str(done.errors.data[0].message)
        assert not front.service.requests
        assert 6 < len(records(front.openai, done.output_file_id)) < 100


def test_a_batch_that_cannot_be_written_holds_up_no_other(
    run_front: RunFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = run_front(FakeService(word_s=0.05), files=FileSettings(tmp_path / "kept"))
    unfinished, is_stuck = BatchStore.unfinished, threading.Event()
    monkeypatch.setattr(
        BatchStore, "unfinished", lambda store: unfinished(store) if is_stuck.is_set() else []
    )
    batches = [asked(front.openai, [line(str(number)) for number in range(20)]) for _ in range(3)]
    stuck, last = sorted(batches[1:], key=lambda each: (each.created_at, each.id))
    (tmp_path / "kept" / "batches" / stuck.id / ".batch.json.part").mkdir()
    is_stuck.set()
    assert {ended(front.openai, each).status for each in (batches[0], last)} == {"completed"}
    assert front.openai.batches.retrieve(stuck.id).status not in FINAL


def test_a_long_batch_holds_up_no_other_key(run_front: RunFront, tmp_path: Path) -> None:
    """The lines of two keys take turns, and together no more are in flight than allowed."""
    kept = FileSettings(tmp_path / "kept", num_in_flight=2)
    front = run_front(FakeService(word_s=0.02), files=kept, api_key="none", admin_api_key="other")
    client, other = front.openai, front.openai.with_options(api_key="other")
    long = asked(client, [line(str(number)) for number in range(1500)])
    wait_until(lambda: client.batches.retrieve(long.id).request_counts.completed > 3)
    short = asked(other, [line(f"short {number}") for number in range(4)])
    assert ended(other, short).status == "completed"
    assert front.service.most_open == 2
    assert client.batches.retrieve(long.id).status == "in_progress"
    assert len(front.service.requests) < 1000
    client.batches.cancel(long.id)
    assert ended(client, long).status == "cancelled"


@pytest.mark.parametrize("hours", [7, -7])
def test_lines_and_streams_go_on_where_the_clock_is_set(
    run_front: RunFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Each has begun before and ends after; what comes then is answered as before."""
    service = FakeService(holds_after=1)
    front = run_front(service, files=FileSettings(tmp_path / "kept"))
    batch = asked(front.openai, [line(str(number)) for number in range(3)])
    with front.http.stream("POST", CHAT, json={**QUESTION, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_until(lambda: service.num_open > 1)
        unix_s = time.time()
        monkeypatch.setattr(time, "time", lambda: unix_s + hours * 3600)
        service.may_go_on.set()
        assert [each for each in lines if each][-1] == "data: [DONE]"
    assert front.ask().status_code == 200
    done = ended(front.openai, batch)
    assert (done.status, len(records(front.openai, done.output_file_id))) == ("completed", 3)
    assert ended(front.openai, asked(front.openai, [line("later")])).status == "completed"


class AfterFirst(FakeService):
    """Which holds all answers but the first, that a batch asks for alone."""

    async def _items(self, request: AnswerRequest) -> AsyncGenerator[AnswerItem, None]:
        self.holds_after = None if self.num_open == 1 else 2
        async for item in super()._items(request):
            yield item


def test_no_more_lines_are_in_flight_than_allowed(run_front: RunFront, tmp_path: Path) -> None:
    service = AfterFirst()
    front = run_front(service, files=FileSettings(tmp_path / "kept", num_in_flight=3))
    batch = asked(front.openai, [line(str(number)) for number in range(24)])
    wait_until(lambda: service.most_open >= 3)
    service.may_go_on.set()
    ended(front.openai, batch)
    assert service.most_open == 3
    assert len(service.requests) == 24


def test_one_server_at_a_time_drives_a_batch(run_front: RunFront, tmp_path: Path) -> None:
    kept = FileSettings(tmp_path / "kept", num_in_flight=2)
    first = FakeService(word_s=0.02)
    other = FakeService()
    with_first = run_front(first, files=kept)
    batch = asked(with_first.openai, [line(str(number)) for number in range(30)])
    wait_until(lambda: first.num_closed > 8)
    with_other = run_front(other, files=kept)
    done = ended(with_other.openai, batch)
    answers = records(with_other.openai, done.output_file_id)
    assert Counter(each["custom_id"] for each in answers) == Counter(str(number) for number in range(30))
    assert not other.requests


def test_lines_wait_while_the_server_is_busy(run_front: RunFront, tmp_path: Path) -> None:
    service = FakeService(error=OverloadedError("busy"))
    front = run_front(service, files=FileSettings(tmp_path / "kept"))
    batch = asked(front.openai, [line("a")])
    wait_until(lambda: len(service.requests) > 1)
    service.error = None
    done = ended(front.openai, batch)
    assert [each["custom_id"] for each in records(front.openai, done.output_file_id)] == ["a"]


def test_batches_belong_to_the_key_that_made_them(run_front: RunFront, tmp_path: Path) -> None:
    kept = FileSettings(tmp_path / "kept")
    front = run_front(files=kept, api_key="none", admin_api_key="two")
    batch = asked(front.openai, [line("a")])
    other = {"authorization": "Bearer two"}
    assert front.http.get(f"/v1/batches/{batch.id}", headers=other).status_code == 404
    assert front.http.post(f"/v1/batches/{batch.id}/cancel", headers=other).status_code == 404
    body = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    assert front.http.post("/v1/batches", headers=other, json=body).status_code == 404
    assert front.http.get("/v1/batches", headers=other).json()["data"] == []
    assert front.http.get("/v1/batches/..%2f..", headers=other).status_code == 404
    assert ended(front.openai, batch).status == "completed"


def test_a_batch_for_which_the_disk_has_no_room_leaves_nothing(
    run_front: RunFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = run_front(files=FileSettings(tmp_path / "kept"))

    def fail(path: Path, _: object) -> None:
        path.with_name(f".{path.name}.part").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("epd.serve_app.files.batch_store.write_record", fail)
    with pytest.raises(openai.InternalServerError, match="No space left on device") as refused:
        asked(front.openai, [line("a")])
    assert refused.value.status_code == 503
    assert list((tmp_path / "kept" / "batches").iterdir()) == []


def test_batches_that_ended_make_room_for_others(run_front: RunFront, tmp_path: Path) -> None:
    client = run_front(files=FileSettings(tmp_path / "kept", max_batches=1)).openai
    first = ended(client, asked(client, [line("a")]))
    second = asked(client, [line("b")])
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(first.id)
    assert client.files.retrieve(str(first.output_file_id)).purpose == "batch_output"
    assert ended(client, second).status == "completed"
