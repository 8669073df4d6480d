"""A flood of connections and of pages leaves turns of the event loop to others."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from fastapi import FastAPI

from epd.serve_app.http.http_server import HttpServer
from tests.serve_app.conftest import Front


async def accepted_in_turns(listener: socket.socket, counts: list[int]) -> None:
    """Serves until 300 connections are accepted; each turn of the loop begins a new count."""
    server = HttpServer(FastAPI(), drain_s=1.0)
    serving = asyncio.create_task(server.serve([listener]))
    while sum(counts) < 300:
        counts.append(0)
        await asyncio.sleep(0)
    server.should_exit = True
    await serving


def test_a_turn_accepts_few_of_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, accept = [0], socket.socket.accept

    def counted(listener: socket.socket) -> Any:
        accepted = accept(listener)
        counts[-1] += 1
        return accepted

    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener, ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        monkeypatch.setattr(socket.socket, "accept", counted)
        asyncio.run(accepted_in_turns(listener, counts))
    assert max(counts) == 16 + (sys.version_info >= (3, 14))  # asyncio accepts one more since then


def test_pages_come_as_routes_answer(front: Front) -> None:
    """Of what routes give every answer, a prepared page has all: an id of its own, and a type."""
    first, second = (front.http.get("/") for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert int(first.headers["content-length"]) == len(first.content)
    assert front.http.get("/page/app.js").headers["content-type"].startswith("text/javascript")
    assert front.http.get("/openapi.json").headers["content-type"] == "application/json"
    assert front.http.post("/").json()["error"]["type"] == "not_found_error"
