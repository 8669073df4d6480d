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

from epd.control.routing import Router
from epd.serve_app.http.api import ApiSettings, create_api
from epd.serve_app.http.server_state import ServerState
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.media.media_worker import MediaSettings, MediaWorker
from epd.serve_app.orchestration.orchestrator import Orchestrator
from epd.serve_app.service import AnswerService
from tests.serve_app.fakes import FakeService
from tests.serve_app.media_fleet import MediaFleet

START_S = 900.0  # on a machine that may be busy; pytest ends a test then
NEVER_S = 3600.0  # what is lost is noticed, however long a busy machine is silent


@dataclass(frozen=True, slots=True)
class Server:
    """media: the worker that keeps its media; None if the service has its own."""

    url: str
    app: FastAPI
    media: MediaWorker | None = None

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
    media: MediaSettings | None = None,
) -> Iterator[Server]:
    """running: open in the server's event loop while it runs. media: of a worker for a fake service."""
    fleet = None if isinstance(service, Orchestrator) else MediaFleet(media)
    if fleet is not None and isinstance(service, FakeService):
        service.file_of = fleet.media["v0"].file_of
    app = create_api(service, FleetMedia(fleet, Router()) if fleet else service.media, settings)
    if running is not None:
        app.router.lifespan_context = _around(app.router.lifespan_context, running)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=int(NEVER_S),  # else it may close what a client is about to use
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Server(url, app, fleet.media["v0"] if fleet else None)
        finally:
            server.should_exit = True
            thread.join(START_S)
            if fleet is not None:
                fleet.close()


def wait_until(condition, seconds: float = START_S) -> None:  # type: ignore[no-untyped-def]
    """Returns as soon as the condition holds. Raises AssertionError when it never does."""
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "waited in vain"
        sleep(0.01)
