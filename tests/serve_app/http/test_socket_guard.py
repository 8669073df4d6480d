"""Connections that are too large or too slow are closed, and stop no other."""

from __future__ import annotations

import asyncio
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS, LoopFactoryType

from epd.serve_app.fair_threads import LoopTurns
from epd.serve_app.http.guard import socket_guard
from epd.serve_app.http.guard.socket_guard import ConnectionRoom, GuardedProtocol, SocketLimits, WriteClock
from tests.serve_app.server import NEVER_S, START_S, wait_until

Room = ConnectionRoom[GuardedProtocol]
Run = Callable[..., str]


def patient(**own: Any) -> SocketLimits:
    """Limits of their own, and no other that acts on a machine that is only slow."""
    return SocketLimits(**{"header_s": NEVER_S, "body_s": NEVER_S, "write_s": NEVER_S, **own})


LARGE = 32 << 20  # far more than the buffers of the system


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, which it reads whole; at `/large` with many bytes."""
    num_bytes, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        has_more = message.get("more_body", False)
    body = bytes(LARGE) if scope["path"] == "/large" else str(num_bytes).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


PAGES: list[str] = []


async def held_pages(release: threading.Event, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers as `echo` does; at `/page` it notes the request, and waits for the release."""
    if scope["path"] == "/page":
        PAGES.append(scope["path"])
        while not release.is_set():
            await asyncio.sleep(0.01)
    await echo(scope, receive, send)


@contextmanager
def guarded(
    limits: SocketLimits, loop: LoopFactoryType = "auto", app: Any = echo, **own: Any
) -> Iterator[str]:
    """own: attributes of the protocol"""
    mine = {"limits": limits, "room": ConnectionRoom(), **own}
    protocol = type("Protocol", (GuardedProtocol,), mine)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        config = uvicorn.Config(
            app, http=protocol, lifespan="off", log_level="error", loop=loop, interface="asgi3"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(START_S)


@pytest.fixture
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield lambda limits, **own: stack.enter_context(guarded(limits, **own))


def connected(address: str, data: bytes = b"") -> socket.socket:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=200)
    sock.sendall(data)
    return sock


def rest(sock: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while more := sock.recv(65536):
            received += more
    return received


def is_answered(address: str) -> bool:
    try:
        return httpx.post(f"http://{address}/", content=b"abc", trust_env=False, timeout=200).text == "3"
    except httpx.TransportError:
        return False


def test_headers_that_do_not_end_are_refused_in_time(run: Run) -> None:
    address, other = run(patient(header_s=0.3)), run(patient())
    start = monotonic()
    with (
        connected(other) as waiting,
        connected(address) as silent,
        connected(address, b"GET / HTTP/1.1\r\nA: b") as begun,
    ):
        assert rest(begun).startswith(b"HTTP/1.1 408")
        assert rest(silent).startswith(b"HTTP/1.1 408")
        assert monotonic() - start > 0.25
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):  # where the limit is another
            waiting.recv(1)
    wait_until(lambda: is_answered(address))


def test_large_headers_are_refused_before_they_are_held(run: Run) -> None:
    address = run(patient())
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
    address = run(patient(body_s=0.4, min_bytes_per_s=5.0))
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n"
    with connected(address, head + b"x") as slow, connected(address, head + b"x" * 9000) as steady:
        assert rest(slow).startswith(b"HTTP/1.1 408")
        steady.sendall(b"x" * 1000)  # in time, since 9000 bytes have bought half an hour
        assert steady.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_body_over_the_limit_closes_the_connection(run: Run) -> None:
    address = run(patient(max_body_bytes=1000))
    with connected(address, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n") as sock:
        with suppress(OSError):
            sock.sendall(b"x" * 5000)
        assert b"200" not in rest(sock)
    assert is_answered(address)


def test_sockets_that_ask_nothing_make_room(run: Run) -> None:
    address = run(patient(max_connections=20))
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(address)) for _ in range(30)]
        assert is_answered(address)
        assert rest(idle[0]) == b""  # the oldest was closed


def test_where_all_connections_are_busy_one_more_is_refused(run: Run) -> None:
    room = Room()
    address = run(patient(max_connections=16), room=room)
    with ExitStack() as stack:
        busy = [stack.enter_context(connected(address, HEAD)) for _ in range(16)]
        wait_until(lambda: are_busy(room))
        with connected(address) as one_more:
            answer = rest(one_more)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"\r\nRetry-After: 1\r\n" in answer
        busy[0].sendall(b"x" * 9)
        assert busy[0].recv(4096).startswith(b"HTTP/1.1 200")


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"


def are_busy(room: Room) -> bool:
    """Whether sixteen connections are there, and the head of each has been read: none makes room."""
    return len(room.held) == 16 and not room.waiting


def asked(address: str, path: str = "/large", count: int = 1) -> socket.socket:
    """Returns a connection whose client has asked, and reads nothing."""
    return connected(address, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * count)


def is_ended(sock: socket.socket) -> bool:
    """Whether the server has ended the connection before all of a large answer was taken."""
    return len(rest(sock)) < LARGE


def test_a_client_that_takes_no_answer_is_ended(run: Run) -> None:
    room = Room()
    address = run(patient(write_s=0.3, min_taken_per_s=2e6), room=room)

    def is_taken_whole() -> bool:
        with asked(address) as steady:
            return read(steady, LARGE) > LARGE

    wait_until(is_taken_whole)  # a client that has no core for that long is a slow one
    with asked(address) as silent, asked(address) as slow:
        read(slow, 1 << 20)  # far less than the buffers of the system hold
        wait_until(lambda: not room.held)  # with what the buffers hold, it has 2 s
        assert is_ended(silent)
        assert is_ended(slow)
    assert is_answered(address)


def test_the_system_holds_little_for_a_client_that_takes_nothing(run: Run) -> None:
    """Or pages for those who read none would be made until the system's buffers are full: 4 MB each."""
    waiting = [0]

    class Counting(WriteClock):
        def start(self, now_s: float, num_bytes: int) -> None:
            waiting.append(num_bytes)
            super().start(now_s, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket_guard, "WriteClock", Counting)
        with asked(run(patient())):
            wait_until(lambda: len(waiting) > 1)
    assert LARGE - waiting[1] < 1 << 20


def read(sock: socket.socket, num_bytes: int) -> int:
    """Returns how many bytes came, which are a few more than `num_bytes` if the server sends them."""
    num_read = 0
    while num_read <= num_bytes and (more := sock.recv(1 << 20)):
        num_read += len(more)
    return num_read


def test_taken_bytes_buy_time() -> None:
    clock = WriteClock(10.0, 1000.0)
    clock.start(100.0, 8000)
    assert (clock.end_s(8000), clock.end_s(5000), clock.end_s(0)) == (110.0, 113.0, 118.0)
    clock.stop(116.0)
    assert clock.patience_s == 2.0
    clock.start(200.0, 1000)
    assert clock.end_s(1000) == 202.0
    clock.stop(200.1)
    assert clock.patience_s == pytest.approx(2.9)
    clock.refill()
    clock.start(300.0, 90_000)
    clock.stop(300.1)
    assert clock.patience_s == 10.0  # and no more


def test_clients_that_take_no_answer_make_room(run: Run) -> None:
    """Two hundred of them hold sixteen connections for about `stuck_s`, and not until they are late."""
    address = run(patient(max_connections=16, stuck_s=0.2))
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(asked(address))
        wait_until(lambda: is_answered(address))  # whose connection is taken behind theirs


def test_health_is_answered_where_all_connections_are_busy(run: Run) -> None:
    room = Room()
    address = run(patient(max_connections=16, num_reserved=3, stuck_s=NEVER_S), room=room)
    with ExitStack() as stack:
        busy = [stack.enter_context(connected(address, HEAD)) for _ in range(16)]
        wait_until(lambda: are_busy(room))
        silent = [stack.enter_context(connected(address)) for _ in range(5)]
        for path, status in (("/health", 200), ("/team/health?x", 200), ("/v1/models", 503)):
            answer = httpx.get(f"http://{address}{path}", trust_env=False, timeout=200)
            assert (answer.status_code, answer.headers["connection"]) == (status, "close")
        assert rest(silent[0]).startswith(b"HTTP/1.1 503")
        busy[0].sendall(b"x" * 9)
        assert busy[0].recv(4096).startswith(b"HTTP/1.1 200")
        assert is_answered(address)


def test_a_connection_has_few_requests_before_their_turn(run: Run) -> None:
    address = run(patient(max_pipelined=3))
    with asked(address, "/", count=500) as sock:
        answers = rest(sock)
    assert answers.count(b"HTTP/1.1 200") == 4  # the one being answered, and three
    assert answers.count(b"connection: close") == 1
    with asked(address, "/", count=4) as sock:
        assert rest(sock).count(b"HTTP/1.1 200") == 4


def test_pages_are_made_a_few_at_a_time_and_questions_do_not_wait_for_them() -> None:
    """Two pages are being made, for ever: a third waits, a question and a probe do not."""
    limits, release = patient(), threading.Event()
    PAGES.clear()
    with (
        guarded(limits, app=partial(held_pages, release), pages=LoopTurns(2, 2)) as address,
        ExitStack() as stack,
    ):
        pages = [stack.enter_context(asked(address, "/page")) for _ in range(3)]
        wait_until(lambda: len(PAGES) == 2)
        assert is_answered(address)
        for path in ("/health", "/v1/models"):
            assert httpx.get(f"http://{address}{path}", trust_env=False, timeout=200).status_code == 200
        assert len(PAGES) == 2
        release.set()
        assert all(page.recv(4096).startswith(b"HTTP/1.1 200") for page in pages)
        assert len(PAGES) == 3


def test_an_answer_that_is_not_taken_keeps_no_closed_connection(run: Run) -> None:
    """The server has closed it, and waits for what it wrote to be taken."""
    room = Room()
    address = run(patient(max_connections=16, write_s=0.3, stuck_s=NEVER_S), room=room)
    request = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with ExitStack() as stack:
        stuck = [stack.enter_context(connected(address, request)) for _ in range(16)]
        wait_until(lambda: is_answered(address))
        wait_until(lambda: not room.held)
        assert is_ended(stuck[0])


def test_requests_on_one_connection_and_pipelined_ones_are_answered(run: Run) -> None:
    address = run(patient())
    one = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    with connected(address, one * 3) as sock:
        received = b""
        while received.count(b"HTTP/1.1 200") < 3:
            more = sock.recv(4096)
            assert more
            received += more


def test_no_answer_waits_for_the_one_before_to_be_acknowledged() -> None:
    with guarded(patient(), loop="asyncio") as address, connected(address) as sock:
        seconds = []
        for _ in range(40):
            start = monotonic()
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"\r\n\r\n0"):
                more = sock.recv(4096)
                assert more
                received += more
            seconds.append(monotonic() - start)
    assert min(seconds[20:]) < 0.03  # a system acknowledges after 40 ms what it need not answer


def test_uvicorn_uses_it_once_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    assert socket_guard.install() == []
    config = uvicorn.Config(echo)
    config.load()
    assert config.http_protocol_class is GuardedProtocol
