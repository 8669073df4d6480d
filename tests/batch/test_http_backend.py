"""Asking a server: the first question about media alone, the others together; what is refused goes again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest

import epd.batch.http_backend as http_backend
from epd.batch.driver import BatchPlan, run_batch
from epd.batch.http_backend import HttpBackend
from epd.batch.in_flight import InFlight
from epd.batch.line_index import LineIndex
from epd.batch.lines import LineDefaults, parse_line
from epd.batch.summary import Summary
from epd.batch.tasks import Answered, Backend, MediaTask
from epd.client.endpoint import Endpoint
from epd.errors import RequestError, UnavailableError
from tests.batch.fakes import completion
from tests.ports import kept_port

KEY = "secret"
Reply = tuple[int, Any]


@dataclass
class FakeServer:
    """answer: gives status and body for a question. spans: of each, (video, start, stop) in seconds.

    options: ours of each body. path: that was asked last. workers: that it says to have.
    """

    answer: Callable[[str], Reply] = lambda question: (200, completion(question))
    pause_s: float = 0.02
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    options: list[Any] = field(default_factory=list)
    url: str = ""
    path: str = ""
    workers: list[dict[str, str]] = field(default_factory=list)

    def reply(self, body: dict[str, Any]) -> Reply:
        start_s = monotonic()
        self.options.append(body.get("epd"))
        video, question = body["messages"][0]["content"]
        self.hold(video["video_url"]["url"])
        reply = self.answer(question["text"])
        self.spans.append((video["video_url"]["url"], start_s, monotonic()))
        return reply

    def hold(self, _url: str) -> None:
        sleep(self.pause_s)


@contextmanager
def serving(server: FakeServer, port: int = 0) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "m"}], "workers": server.workers})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            is_known = self.headers["Authorization"] == f"Bearer {KEY}"
            server.path = self.path
            self._send(*(server.reply(body) if is_known else (401, {"error": {"message": "who?"}})))

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", port), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_port}"
        yield server
        http.shutdown()
        thread.join(5)


def run(
    folder: Path, url: str, num_videos: int = 6, num_questions: int = 8, key: str = KEY, **defaults: Any
) -> Summary:
    lines = [
        {"id": f"{video} {number}", "video": f"{video}.mp4", "question": f"q{number}"}
        for number in range(num_questions)
        for video in range(num_videos)
    ]
    return run_lines(folder, url, key, lines, **defaults)


def run_lines(folder: Path, url: str, key: str, lines: Sequence[dict[str, Any]], **defaults: Any) -> Summary:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    @contextmanager
    def opened(_: LineIndex) -> Iterator[Backend]:
        with HttpBackend.open(url, key) as backend:
            yield backend

    plan = BatchPlan(folder / "in.jsonl", folder / "out.jsonl", LineDefaults(folder, **defaults))
    return run_batch(plan, opened)


def test_questions_about_a_video_follow_its_first_and_come_together(tmp_path: Path) -> None:
    """The second of each video is answered when the third is there."""
    meetings = {f"{number}.mp4": threading.Barrier(2) for number in range(6)}
    num_asked: Counter[str] = Counter()

    class Server(FakeServer):
        def hold(self, url: str) -> None:
            name = url.rpartition("/")[2]
            with lock:
                num_asked[name] += 1
                number = num_asked[name]
            if number in (2, 3):
                meetings[name].wait()

    lock = threading.Lock()
    with serving(Server()) as server:
        summary = run(tmp_path, server.url)
    assert (summary.tally.num_answered, summary.tally.num_failed) == (48, 0)
    by_video: dict[str, list[tuple[float, float]]] = {}
    for video, start_s, stop_s in server.spans:
        by_video.setdefault(video, []).append((start_s, stop_s))
    assert len(by_video) == 6
    for spans in by_video.values():
        first, second, third, *others = sorted(spans)
        assert all(start_s >= first[1] for start_s, _ in (second, third, *others))
        assert third[0] < second[1], "one after the other"


def test_more_than_one_video_is_under_way(tmp_path: Path) -> None:
    """None is answered before all four are asked about."""
    meeting = threading.Barrier(4)

    class Server(FakeServer):
        def hold(self, _url: str) -> None:
            meeting.wait()

    with serving(Server()) as server:
        summary = run(tmp_path, server.url, num_videos=4, num_questions=1)
    assert summary.tally.num_answered == 4


def test_no_more_is_answered_than_somebody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two, three lines of twelve are asked while nobody takes an outcome."""
    num_lines, stopped = 12, threading.Event()

    class Room(asyncio.Semaphore):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.is_of_outcomes = value == 2

        async def acquire(self) -> Literal[True]:
            if self.is_of_outcomes and self.locked():
                stopped.set()
            return await super().acquire()

    class Server(FakeServer):
        def hold(self, _url: str) -> None:
            if len(self.options) == num_lines:
                stopped.set()

    monkeypatch.setattr(http_backend, "MAX_OUTCOMES", 2)
    monkeypatch.setattr(asyncio, "Semaphore", Room)
    texts = [json.dumps({"id": number, "video": "a.mp4", "question": "q"}) for number in range(num_lines)]
    lines = [parse_line(text.encode(), number, LineDefaults(Path())) for number, text in enumerate(texts)]
    with serving(Server()) as server:
        backend = HttpBackend(Endpoint("x", server.url, api_key=KEY), in_flight=InFlight(1, 1))
        with backend.run(iter([MediaTask(0, iter(lines))])) as outcomes:
            stopped.wait()
            assert len(server.options) == 3
            assert sum(outcome is not None for outcome in outcomes) == num_lines


@pytest.mark.parametrize("name", ["uvloop", "asyncio"])
def test_media_are_sent_in_a_loop_of_uvloop_where_it_is_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is here, and the default."""
    loops = []

    async def answer(_: httpx.Request) -> httpx.Response:
        loops.append(asyncio.get_running_loop())
        return httpx.Response(200, json=completion("q"))

    if name == "asyncio":
        monkeypatch.setattr(http_backend, "_LOOPS", name)
    line = parse_line(b'{"id": 1, "video": "a.mp4", "question": "q"}', 0, LineDefaults(Path()))
    backend = HttpBackend(Endpoint("x", "http://x"), transport=httpx.MockTransport(answer))
    with backend.run(iter([MediaTask(0, iter([line]))])) as outcomes:
        assert any(isinstance(outcome, Answered) for outcome in outcomes)
    assert [type(loop).__module__.partition(".")[0] for loop in loops] == [name]


def test_what_is_kept_by_default_is_said_to_the_server(tmp_path: Path) -> None:
    with serving(FakeServer()) as server:
        run(tmp_path, server.url, num_videos=2, num_questions=1, retention=0.25, reduction="evs")
    assert server.options == [{"retention": 0.25, "reduction": "evs"}] * 2


def test_errors_of_the_server_are_told_under_their_lines(tmp_path: Path) -> None:
    def answer(question: str) -> Reply:
        if question == "q1":
            return 404, {
                "error": {"message": "no file", "type": "invalid_request_error", "code": "media_not_found"}
            }
        return (500, {"oops": 1}) if question == "q2" else (200, completion(question))

    with serving(FakeServer(answer)) as server:
        summary = run(tmp_path, server.url, num_videos=1, num_questions=4)
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert {each["id"]: each["error"]["type"] for each in errors} == {
        "0 1": "media_not_found",
        "0 2": "server_error",
    }
    assert summary.tally.num_answered == 2


def test_what_is_refused_for_load_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_backend, "_FIRST_PAUSE_S", 0.01)
    refused: set[str] = set()

    def answer(question: str) -> Reply:
        if question in refused:
            return 200, completion(question)
        refused.add(question)
        return 429, {"error": {"message": "later"}}

    with serving(FakeServer(answer)) as server:
        summary = run(tmp_path, server.url, num_videos=2, num_questions=3)
    assert (summary.tally.num_answered, summary.tally.num_failed) == (6, 0)


def test_a_proxy_that_has_lost_its_server_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Serve's answers in plain text. A server's own error is the line's."""
    monkeypatch.setattr(http_backend, "_FIRST_PAUSE_S", 0.001)
    seen: Counter[str] = Counter()

    def answer(question: str) -> Reply:
        seen[question] += 1
        if question == "q1" and seen[question] == 1:
            return 500, "Internal Server Error"  # no object
        if question == "q2":
            return 500, {"error": {"message": "a fault", "code": "internal_error"}}
        return 200, completion(question)

    with serving(FakeServer(answer)) as server:
        summary = run(tmp_path, server.url, num_videos=1, num_questions=3)
    assert (summary.tally.num_answered, summary.tally.num_failed) == (2, 1)
    assert seen == {"q0": 1, "q1": 2, "q2": 1}


def test_a_server_that_is_gone_ends_the_run_and_fails_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_backend, "_FIRST_PAUSE_S", 0.001)
    with kept_port() as port:
        with (
            serving(FakeServer(lambda _: (503, {})), port) as server,
            pytest.raises(UnavailableError, match="run the same"),
        ):
            run(tmp_path, server.url)
        assert (tmp_path / "out.errors.jsonl").read_bytes() == b""
        with pytest.raises(UnavailableError, match="start the server"):
            run(tmp_path, server.url)


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_line_that_is_refused_while_others_are_answered_is_explained(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_backend, "_FIRST_PAUSE_S", 0.001)

    def answer(question: str) -> Reply:
        body: Any = "lost" if status == 500 else {}
        return (status, body) if question == "q2" else (200, completion(question))

    with serving(FakeServer(answer)) as server:
        summary = run(tmp_path, server.url, num_videos=2, num_questions=4)
    assert (summary.tally.num_answered, summary.tally.num_failed) == (6, 2)
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert {each["id"] for each in errors} == {"0 2", "1 2"}
    assert all(
        f"status {status}, 6 times in a row, and answers other" in str(each["error"]) for each in errors
    )


def test_a_line_at_which_the_server_hangs_up_while_others_are_answered_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There was no answer, so no status: the error of the line says 503, as the batch format needs one."""
    monkeypatch.setattr(http_backend, "_FIRST_PAUSE_S", 0.001)

    def answer(question: str) -> Reply:
        if question == "q2":
            raise ConnectionAbortedError
        return 200, completion(question)

    def line(number: int) -> dict[str, Any]:
        content = [
            {"type": "video_url", "video_url": {"url": "a.mp4"}},
            {"type": "text", "text": f"q{number}"},
        ]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}

    with serving(FakeServer(answer)) as server:
        summary = run_lines(tmp_path, server.url, KEY, [line(number) for number in range(4)])
    assert "ConnectionAbortedError" in capfd.readouterr().err
    assert (summary.tally.num_answered, summary.tally.num_failed) == (3, 1)
    (error,) = [json.loads(each) for each in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("2", 503)
    assert "RemoteProtocolError, 6 times in a row, and answers other lines" in error["error"]["message"]


def test_a_server_that_is_busy_has_a_quarter_of_a_minute_to_recover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses double: a server that is asked again at once is kept busy by its clients.

    The pauses of this module alone: servers of other tests in this process may pause meanwhile.
    """
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(http_backend, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
    with serving(FakeServer(lambda _: (429, {}))) as server, pytest.raises(UnavailableError):
        run(tmp_path, server.url, num_videos=1, num_questions=1)
    assert pauses == [pauses[0] * 2**number for number in range(len(pauses))]
    assert 15 < sum(pauses) < 60


def test_what_a_server_of_ours_reports_is_added_up(tmp_path: Path) -> None:
    stages_s = {"decode_video": 2.0, "preprocess": 0.5, "encode": 1.0, "prefill": 0.25, "decode": 0.25}

    def answer(question: str) -> Reply:
        report = {"stages_s": stages_s if question == "q0" else {"prefill": 0.5, "encode": 0.0}}
        return 200, {**completion(question), "epd": report}

    with serving(FakeServer(answer, pause_s=0)) as server, HttpBackend.open(server.url, KEY) as backend:
        for question in ("q0", "q1"):
            backend.note(answer(question)[1])
        assert backend.busy_s() == {"decode": 2.0, "encode": 1.5, "language": 1.0}
        assert backend.counts().num_encoded == 1


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(RequestError, match="not an endpoint"), HttpBackend.open("server:8000", None):
        pass


@pytest.mark.parametrize(("roles", "num_media"), [("", 4), ("e p d", 4), ("ep ep epd d v", 12)])
def test_a_server_with_many_workers_is_asked_about_more_media_at_once(roles: str, num_media: int) -> None:
    server = FakeServer(workers=[{"roles": letters} for letters in roles.split()])
    with serving(server), HttpBackend.open(server.url, KEY) as backend:
        assert (backend.max_tasks, backend.in_flight.lines) == (num_media, 16 * num_media)
    with serving(server), HttpBackend.open([server.url], KEY, media_in_flight=100) as backend:
        assert (backend.max_tasks, backend.in_flight.lines) == (100, max(100, 16 * num_media))
