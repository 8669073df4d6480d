"""Serves the HTTP app on sockets of this process, with the limits of `socket_guard`."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from epd.serve_app.http.guard.socket_guard import GuardedProtocol
from epd.serve_app.http.prefix import ROOT, under_prefix


class HttpServer(uvicorn.Server):
    """Runs uvicorn in an event loop of the process, whose signals it leaves alone.

    listening: set once it accepts connections
    """

    def __init__(self, app: FastAPI, drain_s: float, prefix: str = ROOT) -> None:
        """Prepares to serve. drain_s: for requests in flight, once `should_exit` is set. prefix: of paths."""
        self.listening = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                under_prefix(app, prefix),
                http=GuardedProtocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=math.ceil(drain_s),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: whoever runs the process handles them."""
        yield
