"""The app behind a real HTTP server on loopback, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import uvicorn
from fastapi import FastAPI

from serve_app.http.api import ApiSettings, create_api
from serve_app.http.server_state import ServerState
from serve_app.service import AnswerService

START_S = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    app: FastAPI

    @property
    def front(self) -> ServerState:
        front = self.app.state.server
        assert isinstance(front, ServerState)
        return front


def _around(
    inner: Callable[[FastAPI], AbstractAsyncContextManager[Any]], running: AbstractAsyncContextManager[None]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running, inner(app):
            yield

    return lifespan


@contextmanager
def served(
    service: AnswerService,
    settings: ApiSettings | None = None,
    *,
    running: AbstractAsyncContextManager[None] | None = None,
) -> Iterator[Server]:
    """running: open in the server's event loop while it runs."""
    app = create_api(service, settings)
    if running is not None:
        app.router.lifespan_context = _around(app.router.lifespan_context, running)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=2)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        try:
            yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}", app)
        finally:
            server.should_exit = True
            thread.join(START_S)


def wait_until(condition, seconds: float = START_S) -> None:  # type: ignore[no-untyped-def]
    """Returns as soon as the condition holds. Raises AssertionError when it never does."""
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "waited in vain"
        sleep(0.01)
