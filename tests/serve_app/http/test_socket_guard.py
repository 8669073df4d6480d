"""Connections that are too large or too slow are closed, and stop no other."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from epd.serve_app.http.guard import socket_guard
from epd.serve_app.http.guard.socket_guard import GuardedProtocol, SocketLimits
from tests.serve_app.server import wait_until

Run = Callable[[SocketLimits], str]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, which it reads whole."""
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        has_more = message.get("more_body", False)
    body = str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def guarded(limits: SocketLimits) -> Iterator[str]:
    protocol = type("Protocol", (GuardedProtocol,), {"limits": limits, "_waiting": {}})
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        server = uvicorn.Server(uvicorn.Config(echo, http=protocol, lifespan="off", log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield lambda limits: stack.enter_context(guarded(limits))


def connected(address: str, data: bytes = b"") -> socket.socket:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(data)
    return sock


def rest(sock: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(65536):
            received += more
    return received


def is_answered(address: str) -> bool:
    return httpx.post(f"http://{address}/", content=b"abc", trust_env=False, timeout=10).text == "3"


def test_headers_that_do_not_end_are_refused_in_time(run: Run) -> None:
    address = run(SocketLimits(header_s=0.3))
    start = monotonic()
    with connected(address) as silent, connected(address, b"GET / HTTP/1.1\r\nA: b") as begun:
        assert rest(begun).startswith(b"HTTP/1.1 408")
        assert rest(silent).startswith(b"HTTP/1.1 408")
    assert 0.25 < monotonic() - start < 5
    assert is_answered(address)


def test_large_headers_are_refused_before_they_are_held(run: Run) -> None:
    address = run(SocketLimits())
    tracemalloc.start()
    try:
        with connected(address, b"GET / HTTP/1.1\r\nA: ") as sock, suppress(OSError):
            for _ in range(256):
                sock.sendall(b"x" * (256 << 10))  # 64 MB in all
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with connected(address, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n") as sock:
        assert rest(sock).startswith(b"HTTP/1.1 431")
    assert is_answered(address)


def test_a_slow_body_is_refused_and_a_steady_one_is_not(run: Run) -> None:
    address = run(SocketLimits(body_s=0.4, min_bytes_per_s=1000.0))
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with connected(address, head + b"x") as slow, connected(address, head + b"x" * 900) as steady:
        assert rest(slow).startswith(b"HTTP/1.1 408")
        steady.sendall(b"x" * 100)  # in time, since 900 bytes have bought 0.9 s
        assert steady.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_over_the_limit_closes_the_connection(run: Run) -> None:
    address = run(SocketLimits(max_body_bytes=1000))
    with connected(address, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n") as sock:
        with suppress(OSError):
            sock.sendall(b"x" * 5000)
        assert b"200" not in rest(sock)
    assert is_answered(address)


def test_sockets_that_ask_nothing_make_room(run: Run) -> None:
    address = run(SocketLimits(max_connections=20))
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(address)) for _ in range(30)]
        assert is_answered(address)
        assert rest(idle[0]) == b""  # the oldest was closed


def test_where_all_connections_are_busy_one_more_is_refused(run: Run) -> None:
    address = run(SocketLimits(max_connections=16))
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:
        busy = [stack.enter_context(connected(address, head)) for _ in range(16)]
        with connected(address) as one_more:
            answer = rest(one_more)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"\r\nRetry-After: 1\r\n" in answer
        busy[0].sendall(b"x" * 9)
        assert busy[0].recv(4096).startswith(b"HTTP/1.1 200")


def test_requests_on_one_connection_and_pipelined_ones_are_answered(run: Run) -> None:
    address = run(SocketLimits(header_s=0.5))
    one = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    with connected(address, one * 3) as sock:
        received = b""
        while received.count(b"HTTP/1.1 200") < 3:
            received += sock.recv(4096)


def test_uvicorn_uses_it_once_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    assert socket_guard.install() == []
    config = uvicorn.Config(echo)
    config.load()
    assert config.http_protocol_class is GuardedProtocol
