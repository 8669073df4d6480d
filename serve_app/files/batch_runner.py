"""Drives the batches of a folder: one of each owner at a time, and the lines of owners in turns.

The server's own app is asked, so that lines of batches are requests like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from epd.batch.driver import BatchPlan, run_batch
from epd.batch.http_backend import HttpBackend
from epd.batch.in_flight import MAX_TASKS, InFlight
from epd.batch.line_files import whole_lines
from epd.batch.line_index import LineIndex
from epd.batch.lines import BOM, LineDefaults
from epd.batch.result_files import ResultFiles, errors_path
from epd.batch.tasks import Answered, BackendCounts, MediaTask, Outcome
from epd.client.endpoint import Endpoint
from epd.errors import EPDError, RequestError
from epd.serve_app.clients import Client, driver_of
from epd.serve_app.fair_threads import FairTurns
from epd.serve_app.files.batch_store import BatchStore
from epd.serve_app.files.records import BatchError, BatchErrors, BatchStatus, RequestCounts, StoredBatch
from epd.serve_app.files.settings import FileSettings

logger = logging.getLogger(__name__)

OWN_URL = "http://localhost"
LOOK_S = 1.0
_RETRY_S = 5.0
_JOIN_S = 15.0
# Owners whose batches one server drives at once; those of others wait, or other servers drive them.
_MAX_LANES = 8
# Requests above 0 are work that no user waits for.
_PRIORITY = 1
_SAVE_S = 1.0

OpenBackend = Callable[[str], HttpBackend]


class _Stopped(Exception):
    """Ends a run early. status: of the batch then; None for one that goes on after a restart."""

    def __init__(self, status: BatchStatus | None) -> None:
        super().__init__(status)
        self.status = status


class BatchRun:
    """Runs a batch that this thread has claimed, as `epd batch` does: lines are asked once each.

    validating -> in_progress -> finalizing -> completed
         |             '-> cancelled, expired: with what has been answered
         '-> failed: with what was answered before the file was gone, if anything
    """

    def __init__(
        self, store: BatchStore, stored: StoredBatch, open_backend: OpenBackend, stop: threading.Event
    ) -> None:
        """Prepares a run. open_backend: makes what asks an endpoint. stop: set when the server ends."""
        self._store = store
        self._stored = stored
        self._open_backend = open_backend
        self._stop = stop
        self._out = store.folder_of(stored.batch.id) / "results.jsonl"
        self._looked_s = 0.0

    def drive(self) -> None:
        """Runs the batch to its end, or until the server ends. Raises EPDError to be tried again, OSError."""
        status: BatchStatus | None = "completed"
        if self._stored.batch.status != "finalizing":
            try:
                self.check()
                self._answer_all()
                self._set("finalizing", finalizing_at=int(time.time()))
            except _Stopped as stopped:
                status = stopped.status
            except RequestError as error:
                self.fail("invalid_file", str(error))
                return
        if status is not None:
            self._finish(status)

    def fail(self, code: str, message: str) -> None:
        """Ends a batch of which nothing more can be asked. What was answered before a restart is kept."""
        source = str(self._store.files.path_of(self._stored.batch.input_file_id))
        shown = message.replace(source, self._stored.batch.input_file_id)
        errors = BatchErrors(data=[BatchError(code=code, message=shown)])
        self._set("failed", failed_at=int(time.time()), errors=errors, **self._results())

    def check(self) -> None:
        """Raises _Stopped if the batch is to end early."""
        if self._stop.is_set():
            raise _Stopped(None)
        if self._store.is_cancelled(self._stored.batch.id):
            raise _Stopped("cancelled")
        if time.time() > self._stored.batch.expires_at:
            raise _Stopped("expired")

    def _answer_all(self) -> None:
        batch = self._stored.batch
        source = self._store.files.path_of(batch.input_file_id)
        total = num_lines(source, self._store.settings)
        self._count(RequestCounts(total=total))
        defaults = LineDefaults(
            source.parent,
            is_from_client=True,
            url=batch.endpoint,
            least_priority=_PRIORITY,
            max_line_bytes=self._store.settings.max_line_bytes,
        )

        @contextmanager
        def backend(_: LineIndex) -> Iterator[_Watched]:
            if self._stored.batch.status == "validating":
                self._set("in_progress", in_progress_at=int(time.time()))
            self._count(self._ended(total))
            yield _Watched(self._open_backend(batch.endpoint), self)

        run_batch(BatchPlan(source, self._out, defaults), backend)
        self._count(self._ended(total))

    def _ended(self, total: int) -> RequestCounts:
        """Counts what is in the two files."""
        return RequestCounts(
            total=total, completed=_newlines(self._out), failed=_newlines(errors_path(self._out))
        )

    def note(self, outcome: Outcome | None) -> None:
        """Counts an outcome, and saves the counts now and then. Raises _Stopped."""
        counts = self._stored.batch.request_counts
        if isinstance(outcome, Answered):
            counts.completed += 1
        elif outcome is not None:
            counts.failed += 1
        if self._stop.is_set():
            raise _Stopped(None)
        if time.monotonic() - self._looked_s > _SAVE_S:
            self._looked_s = time.monotonic()
            self.check()
            self._count(counts)

    def _finish(self, status: BatchStatus) -> None:
        """Makes the results files of the client's. Done again after a crash, it changes nothing more."""
        self._set(status, **self._results(), **{f"{status}_at": int(time.time())})

    def _results(self) -> dict[str, str | None]:
        """Returns the ids of the files of results, which are the client's from now on: whole lines."""
        ResultFiles(self._out).close()  # cuts off the half of a line that was written last
        paths = {"output": self._out, "error": errors_path(self._out)}
        return {f"{name}_file_id": self._adopt(path, name) for name, path in paths.items()}

    def _adopt(self, path: Path, name: str) -> str | None:
        """Returns the id of the file that results become; None without any."""
        batch_id = self._stored.batch.id
        digest = hashlib.blake2b(f"{batch_id} {name}".encode(), digest_size=12).hexdigest()
        file_id = f"file-{digest}"
        if path.exists() and not path.stat().st_size:
            path.unlink()
        if not path.exists() and not self._store.files.path_of(file_id).exists():
            return None
        shown = f"{batch_id}_{name}.jsonl"
        return self._store.files.adopt(path, self._stored.owner, file_id, shown, "batch_output").id

    def _count(self, counts: RequestCounts) -> None:
        self._set(self._stored.batch.status, request_counts=counts)

    def _set(self, status: BatchStatus, **changes: object) -> None:
        batch = self._stored.batch.model_copy(update={"status": status, **changes})
        self._stored = self._stored.model_copy(update={"batch": batch})
        self._store.save(self._stored)


class _Watched:
    """Implements `Backend` with another one, and ends when its batch is to end."""

    def __init__(self, inner: HttpBackend, run: BatchRun) -> None:
        self._inner = inner
        self._run = run
        self.max_tasks = inner.max_tasks

    @property
    def num_in_flight(self) -> int:
        return self._inner.num_in_flight

    @contextmanager
    def run(self, tasks: Iterator[MediaTask]) -> Iterator[Iterator[Outcome | None]]:
        with self._inner.run(tasks) as outcomes:
            yield self._noted(outcomes)

    def _noted(self, outcomes: Iterator[Outcome | None]) -> Iterator[Outcome | None]:
        """Notes an outcome after it was written."""
        for outcome in outcomes:
            yield outcome
            self._run.note(outcome)

    def busy_s(self) -> Mapping[str, float]:
        return self._inner.busy_s()

    def counts(self) -> BackendCounts:
        return self._inner.counts()


def num_lines(source: Path, settings: FileSettings) -> int:
    """Counts the lines that are not blank. Raises RequestError for too many, and for none."""
    count = 0
    try:
        with source.open("rb") as file:
            for text, _ in whole_lines(file, settings.max_line_bytes):
                count += bool(text.removeprefix(BOM).strip())
                if count > settings.max_lines:
                    raise RequestError(f"the file has more than {settings.max_lines} lines; split it")
    except OSError as error:
        raise RequestError(f"the input cannot be read: {error.strerror}; upload it again") from None
    if not count:
        raise RequestError("the file has no lines; allowed: a request on each; upload another")
    return count


def _newlines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))


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
            in_flight = InFlight(MAX_TASKS, max(MAX_TASKS, self._store.settings.num_in_flight))
            return HttpBackend(
                Endpoint("batch", OWN_URL), path=path, transport=transport, in_flight=in_flight
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
