"""Drives the batches of a folder, one at a time, as long as the server runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

from starlette.types import ASGIApp

from epd.batch.http_backend import HttpBackend
from epd.client.endpoint import Endpoint
from epd.errors import EPDError
from epd.serve_app.files.app_transport import OWN_URL, AppTransport
from epd.serve_app.files.batch_run import BatchRun
from epd.serve_app.files.batch_store import BatchStore

logger = logging.getLogger(__name__)

LOOK_S = 1.0
_RETRY_S = 5.0
_JOIN_S = 15.0


class BatchRunner:
    """Looks for batches that no server drives, the oldest first; those of servers that end go on."""

    def __init__(self, store: BatchStore, app: ASGIApp, api_key: str | None) -> None:
        """Prepares to run. app: answers lines, in the event loop of `start`. api_key: that it wants."""
        self._store = store
        self._app = app
        self._api_key = api_key
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to look. Called in the app's event loop."""
        transport = AppTransport(self._app, asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._work, args=(transport,), name="batches", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends the lines in flight; they are asked again by the next server."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    def _work(self, transport: AppTransport) -> None:
        while not self._stop.is_set():
            pause_s = LOOK_S
            for batch_id in self._store.unfinished():
                try:
                    self._drive(batch_id, transport)
                except (EPDError, OSError) as error:
                    logger.warning("batch_id=%s waits: %s", batch_id, error)
                    pause_s = _RETRY_S
            self._stop.wait(pause_s)

    def _drive(self, batch_id: str, transport: AppTransport) -> None:
        def backend(path: str) -> HttpBackend:
            endpoint = Endpoint("batch", OWN_URL, api_key=self._api_key)
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
