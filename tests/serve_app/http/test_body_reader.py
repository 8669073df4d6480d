"""Clients that send slowly, or never finish, cost nobody else an answer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from time import monotonic, sleep
from typing import cast

import pytest
from fastapi import Request

from epd.serve_app.http.guard.body_reader import BodyLimits, BodyReader
from tests.serve_app.conftest import QUESTION, Front
from tests.serve_app.server import NEVER_S, wait_until

BODY = json.dumps(QUESTION).encode()


def unfinished(front: Front, num_bytes: int, announced: int = 1 << 20) -> socket.socket:
    """A connection whose body never comes to its end."""
    host, port = front.server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=200)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {announced}\r\n\r\n"
    sock.sendall(head.encode() + b" " * num_bytes)
    return sock


def answer(sock: socket.socket) -> bytes:
    """All that the server sends until it closes."""
    received = b""
    while more := sock.recv(65536):
        received += more
    return received


def test_a_body_that_never_ends_is_refused_in_time(run_front: Callable[..., Front]) -> None:
    front, other = run_front(bodies=BodyLimits(grace_s=0.3)), run_front(bodies=BodyLimits(grace_s=NEVER_S))
    start = monotonic()
    with unfinished(other, 10) as waiting, unfinished(front, 10) as sock:
        reply = answer(sock)  # the connection is closed too
        assert monotonic() - start > 0.25
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):  # where the limit is another
            waiting.recv(1)
    assert reply.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in reply
    assert front.ask().status_code == 200


def test_a_body_that_comes_fast_enough_is_taken(run_front: Callable[..., Front]) -> None:
    """It is longer on its way than what is not fast enough has; its first bytes have bought an hour."""
    front = run_front(bodies=BodyLimits(grace_s=0.3, min_bytes_per_s=0.1))
    with unfinished(front, 400, announced=400 + len(BODY)) as sock:
        sleep(0.5)
        sock.sendall(BODY)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_hundreds_of_unfinished_bodies_stop_no_question(run_front: Callable[..., Front]) -> None:
    front = run_front(bodies=BodyLimits(max_reading=100, grace_s=NEVER_S))
    with ExitStack() as stack:
        sockets = [stack.enter_context(unfinished(front, 10)) for _ in range(140)]
        wait_until(lambda: front.server.front.bodies.num_reading == 100)
        assert answer(sockets[0]).startswith(b"HTTP/1.1 408")  # the oldest made room
        assert front.ask().status_code == 200
        assert front.http.get("/health").status_code == 200


def test_large_unfinished_bodies_leave_room_for_small_ones(run_front: Callable[..., Front]) -> None:
    limits = BodyLimits(max_held_bytes=3 << 20, small_bytes=4096, grace_s=NEVER_S)
    front = run_front(bodies=limits)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(unfinished(front, (1 << 20) - 100, announced=2 << 20))
        held = front.server.front.bodies.budget
        wait_until(lambda: held.num_taken > (3 << 20) - 3 * 8192)
        assert front.ask(user="x" * 50_000).status_code == 429  # nothing is left for large ones
        assert front.ask().status_code == 200


def test_a_client_that_leaves_while_it_sends_is_a_line_and_no_traceback(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="epd.serve_app"):
        unfinished(front, 10).close()
        wait_until(lambda: "status=499 error=disconnected" in caplog.text)
    assert "bug" not in caplog.text
    assert "Traceback" not in caplog.text


def test_chunks_that_are_there_wait_for_no_turn_of_the_event_loop() -> None:
    """Otherwise an upload takes as many turns as it has chunks, each as long as what others send."""

    class Sent:
        async def stream(self) -> AsyncIterator[bytes]:
            for _ in range(16):
                yield b"x"

    async def read() -> tuple[int, list[bytes]]:
        loop, turns, is_over = asyncio.get_running_loop(), 0, False

        def count() -> None:
            nonlocal turns
            turns += 1
            if not is_over:
                loop.call_soon(count)

        loop.call_soon(count)
        chunks = [chunk async for chunk in BodyReader().chunks(cast(Request, Sent()))]
        is_over = True
        return turns, chunks

    assert asyncio.run(read()) == (0, [b"x"] * 16)
