"""Drives the batches of a folder: one of each owner at a time, and the lines of owners in turns.

The server's own app is asked, so that lines of batches are requests like any other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from epd.batch.http_backend import HttpBackend
from epd.client.endpoint import Endpoint
from epd.errors import EPDError
from epd.serve_app.clients import Client, driver_of
from epd.serve_app.fair_threads import FairTurns
from epd.serve_app.files.batch_run import BatchRun
from epd.serve_app.files.batch_store import BatchStore

logger = logging.getLogger(__name__)

OWN_URL = "http://localhost"
LOOK_S = 1.0
_RETRY_S = 5.0
_JOIN_S = 15.0
# Owners whose batches one server drives at once; those of others wait, or other servers drive them.
_MAX_LANES = 8


class OwnApp:
    """Has an app answer the lines of several owners in turns, at most `num_in_flight` of all at once."""

    def __init__(self, app: ASGIApp, loop: asyncio.AbstractEventLoop, num_in_flight: int) -> None:
        """Takes the app, and the event loop that it runs in."""
        self._app = app
        self._loop = loop
        self._turns = FairTurns(num_in_flight, num_in_flight)

    async def answer(self, request: httpx.Request, owner: str) -> httpx.Response:
        """Returns the answer to a request of any event loop; cancelling it there ends it here."""
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._in_turn(request, owner), self._loop)
        )

    async def _in_turn(self, request: httpx.Request, owner: str) -> httpx.Response:
        async with self._turns.turn(owner):
            asked = httpx.ASGITransport(_asked_by(driver_of(owner), self._app), raise_app_exceptions=False)
            return await asked.handle_async_request(request)


def _asked_by(client: Client, app: ASGIApp) -> ASGIApp:
    """Returns the app for requests of a client, which come with no key."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"client": client}}, receive, send)

    return answer


class AppTransport(httpx.AsyncBaseTransport):
    """Passes an owner's requests to the app."""

    def __init__(self, app: OwnApp, owner: str) -> None:
        self._app = app
        self._owner = owner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._app.answer(request, self._owner)


class BatchRunner:
    """Looks for batches that no server drives, the oldest first; those of servers that end go on."""

    def __init__(self, store: BatchStore, app: ASGIApp) -> None:
        """Prepares to run. app: answers lines, in the event loop of `start`."""
        self._store = store
        self._app = app
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to look. Called in the app's event loop."""
        app = OwnApp(self._app, asyncio.get_running_loop(), self._store.settings.num_in_flight)
        self._thread = threading.Thread(target=self._work, args=(app,), name="batches", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends the lines in flight; they are asked again by the next server."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _work(self, app: OwnApp) -> None:
        lanes: dict[str, threading.Thread] = {}
        while not self._stop.is_set():
            lanes = {owner: lane for owner, lane in lanes.items() if lane.is_alive()}
            for owner, batch_ids in self._unfinished().items():
                if owner not in lanes and len(lanes) < _MAX_LANES:
                    lanes[owner] = lane = threading.Thread(
                        target=self._drive_all, args=(owner, batch_ids, app), name="batches", daemon=True
                    )
                    lane.start()
            self._stop.wait(LOOK_S)
        for lane in lanes.values():
            lane.join()

    def _unfinished(self) -> Mapping[str, Sequence[str]]:
        """Returns the ids of batches that have not ended by owner, the oldest first."""
        found: dict[str, list[str]] = {}
        for batch_id in self._store.unfinished():
            if (stored := self._store.read(batch_id)) is not None:
                found.setdefault(stored.owner, []).append(batch_id)
        return found

    def _drive_all(self, owner: str, batch_ids: Sequence[str], app: OwnApp) -> None:
        """Drives an owner's batches one after another. Waits at the end if one is to be tried again."""
        pause_s = 0.0
        for batch_id in batch_ids:
            try:
                self._drive(batch_id, AppTransport(app, owner))
            except (EPDError, OSError) as error:
                logger.warning("batch_id=%s waits: %s", batch_id, error)
                pause_s = _RETRY_S
        self._stop.wait(pause_s)

    def _drive(self, batch_id: str, transport: AppTransport) -> None:
        def backend(path: str) -> HttpBackend:
            endpoint = Endpoint("batch", OWN_URL)
            return HttpBackend(
                endpoint, path=path, transport=transport, max_requests=self._store.settings.num_in_flight
            )

        with suppress(FileNotFoundError), self._store.claimed(batch_id) as stored:
            if stored is None or self._stop.is_set():
                return
            run = BatchRun(self._store, stored, backend, self._stop)
            try:
                run.drive()
            except (EPDError, OSError):
                raise
            except Exception:  # a bug ends one batch, not the others
                logger.exception("batch_id=%s ended by a bug", batch_id)
                run.fail("server_error", f"internal error; the server's log has details under {batch_id}")
