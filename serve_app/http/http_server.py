"""Serves the HTTP app on sockets of this process, with the limits of `socket_guard`."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from epd.serve_app.http.address import ROOT, under_prefix
from epd.serve_app.http.guard.socket_guard import GuardedProtocol
from epd.serve_app.observability.logs import operation, with_fields

_SAY_EVERY_S = 5.0  # how many requests are left
# Connections that a turn of the event loop accepts, and those that wait for a turn in the system.
_MAX_ACCEPTED, _BACKLOG = 16, 2048


def _is_no_cut(record: logging.LogRecord) -> bool:
    """Leaves out what uvicorn says of requests that a drain cuts off, a traceback for each."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, asyncio.CancelledError) or str(record.msg).startswith("Cancel %s running"))


logging.getLogger("uvicorn.error").addFilter(_is_no_cut)


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
                backlog=_MAX_ACCEPTED,
                timeout_graceful_shutdown=math.ceil(drain_s),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)  # asyncio has one number for both
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains: says how many requests are left when it begins, at intervals, and when it has ended."""
        start_s, num_begun = time.monotonic(), self._num_left
        if num_begun:
            limit_s = self.config.timeout_graceful_shutdown
            _say(f"draining: {num_begun} requests in flight, up to {limit_s} s for them", "drain", num_begun)
        saying = asyncio.create_task(self._say_what_is_left())
        try:
            await super().shutdown(sockets)
        finally:
            saying.cancel()
        num_left = self._num_left  # uvicorn has cancelled these
        seconds = time.monotonic() - start_s
        _say(
            f"drained in {seconds:.1f} s: {num_begun - num_left} requests answered, {num_left} cut off",
            "drained",
            num_left,
        )

    @property
    def _num_left(self) -> int:
        return len(self.server_state.tasks)

    async def _say_what_is_left(self) -> None:
        while True:
            await asyncio.sleep(_SAY_EVERY_S)
            _say(f"draining: {self._num_left} requests left", "draining", self._num_left)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: whoever runs the process handles them."""
        yield


def _say(line: str, event: str, num_left: int) -> None:
    operation.info(line, extra=with_fields(event, {"num_requests": num_left}))
