"""A drain is said as a drain: how many requests it begins with, how many are left, and how it ended."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from epd.serve_app.http import http_server
from epd.serve_app.http.http_server import HttpServer
from epd.serve_app.observability.logs import OPERATION
from tests.serve_app.server import NEVER_S, wait_until


class SlowApp(FastAPI):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.num_asked = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        self.num_asked += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"done"})


@pytest.fixture
def asked() -> Iterator[tuple[HttpServer, SlowApp, threading.Thread, list[str]]]:
    """A server with one request in flight, its thread, and what its client gets. A drain waits for ever."""
    app, got = SlowApp(), list[str]()
    server = HttpServer(app, drain_s=NEVER_S)

    def ask(url: str) -> None:
        try:
            got.append(httpx.get(url, timeout=200, trust_env=False).text)
        except httpx.HTTPError as error:
            got.append(type(error).__name__)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        client = threading.Thread(target=ask, args=(url,))
        client.start()
        wait_until(lambda: app.num_asked == 1)
        yield server, app, thread, got
        app.may_end.set()
        server.should_exit = True
        thread.join()
        client.join()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of ours, and errors of uvicorn's."""
    return [each.getMessage() for each in caplog.records if each.name in (OPERATION, "uvicorn.error")]


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", OPERATION)


def test_what_is_left_is_said_until_it_is_answered(
    asked: tuple[HttpServer, SlowApp, threading.Thread, list[str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_SAY_EVERY_S", 0.05)
    server, app, thread, got = asked
    server.should_exit = True
    wait_until(lambda: "draining: 1 requests left" in said(caplog))
    app.may_end.set()
    thread.join()
    lines = said(caplog)
    assert lines[0] == f"draining: 1 requests in flight, up to {NEVER_S:.0f} s for them"
    assert set(lines[1:-1]) <= {"draining: 1 requests left", "draining: 0 requests left"}
    assert lines[-1].endswith(" s: 1 requests answered, 0 cut off")
    wait_until(lambda: got == ["done"])


def test_a_request_that_is_cut_off_is_counted_and_leaves_no_traceback(
    asked: tuple[HttpServer, SlowApp, threading.Thread, list[str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "_SAY_EVERY_S", NEVER_S)
    server, _app, thread, got = asked
    server.config.timeout_graceful_shutdown = 1
    server.should_exit = True
    thread.join()
    first, last = said(caplog)
    assert first.startswith("draining: 1 requests")
    assert last.endswith(" s: 0 requests answered, 1 cut off")
    wait_until(lambda: got == ["RemoteProtocolError"])
