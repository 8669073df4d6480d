"""Answers `epd batch` with a server of the OpenAI chat API, questions about the same media together.

    media a   first question | the others, at once
    media b         first question | the others, at once

The first question brings the media into the server's caches; the others find them there. Requests that are
refused for load, or lost with a connection, are retried. One that is refused repeatedly while others are
answered counts as a failure of its line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any

import httpx

from epd.batch.lines import CHAT_URL, JSON, BatchLine
from epd.batch.tasks import Answered, BackendCounts, Failed, MediaTask, Outcome
from epd.client.endpoint import Endpoint, get, parse_endpoints
from epd.errors import InternalError, UnavailableError
from epd.transfer.bounded_queue import BoundedQueue, QueueClosed

MAX_TASKS = 4
MAX_REQUESTS = 16
MAX_OUTCOMES = 1024
NUM_TRIES = 6
_TICK_S = 0.1
_CONNECT_S = 30.0
_TIMEOUT_S = 3600.0
_FIRST_PAUSE_S = 0.5
_JOIN_S = 10.0
_SEED_BYTES = 4
_AGAIN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
# Stages that our server reports.
_STAGES = {
    "decode_video": "decode",
    "preprocess": "encode",
    "encode": "encode",
    "prefill": "language",
    "decode": "language",
}


class HttpBackend:
    """Implements `Backend` over HTTP. Stages are as the server reports them; empty if it is not ours."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        path: str = CHAT_URL,
        transport: httpx.AsyncBaseTransport | None = None,
        max_requests: int = MAX_REQUESTS,
        has_seeds: bool = False,
    ) -> None:
        """Takes the server.

        path: that is asked.
        transport: if not TCP.
        max_requests: in flight.
        has_seeds: whether lines without a seed get one that is the same whenever they are repeated.
        """
        self._endpoint = endpoint
        self._has_seeds = has_seeds
        self.path = path
        self.transport = transport
        self.max_requests = max_requests
        self._busy_s: dict[str, float] = {}
        self._num_cold = 0

    @classmethod
    @contextmanager
    def open(cls, url: str, api_key: str | None, **options: Any) -> Iterator[HttpBackend]:
        """Raises RequestError for an invalid URL, UnavailableError when no server answers."""
        (endpoint,) = parse_endpoints([url], api_key=api_key)
        get(endpoint, "/v1/models", "start the server, or give its --api-key")
        yield cls(endpoint, **options)

    @contextmanager
    def run(self, tasks: Iterator[MediaTask]) -> Iterator[Iterator[Outcome | None]]:
        outcomes: BoundedQueue[Outcome | BaseException | None] = BoundedQueue(MAX_OUTCOMES)
        loop = asyncio.new_event_loop()
        work = loop.create_task(_HttpRun(self, tasks, outcomes).run())
        thread = threading.Thread(target=_worked, args=(loop, work, outcomes), name="batch-http", daemon=True)
        thread.start()
        try:
            yield _outcomes(outcomes)
        finally:
            outcomes.close()
            with suppress(RuntimeError):  # the loop may be over
                loop.call_soon_threadsafe(work.cancel)
            thread.join(_JOIN_S)

    def note(self, completion: JSON) -> None:
        """Keeps the server's report of the work for one answer."""
        report = completion.get("epd")
        if not isinstance(report, dict):
            return
        stages_s = report.get("stages_s") or {}
        for name, stage in _STAGES.items():
            self._busy_s[stage] = self._busy_s.get(stage, 0.0) + float(stages_s.get(name, 0.0))
        self._num_cold += float(stages_s.get("encode", 0.0)) > 0

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def body_of(self, line: BatchLine) -> JSON:
        """Returns what is sent for a line."""
        is_complete = not self._has_seeds or line.body.get("seed") is not None
        return line.body if is_complete else {**line.body, "seed": _seed(line.key)}

    def busy_s(self) -> Mapping[str, float]:
        return dict(self._busy_s)

    def counts(self) -> BackendCounts:
        """Counts lines for which something was encoded; the server does not report media."""
        return BackendCounts(self._num_cold)


def _seed(key: str) -> int:
    """Returns a seed that is the same whenever the line is repeated."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=_SEED_BYTES).digest()) >> 1


def _worked(
    loop: asyncio.AbstractEventLoop,
    work: asyncio.Task[None],
    outcomes: BoundedQueue[Outcome | BaseException | None],
) -> None:
    error: BaseException | None = None
    try:
        loop.run_until_complete(work)
    except BaseException as raised:  # noqa: BLE001 - raised again where the outcomes are awaited
        error = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
    finally:
        loop.close()
    with suppress(QueueClosed):
        outcomes.put(error or StopIteration(), 1)


def _outcomes(outcomes: BoundedQueue[Outcome | BaseException | None]) -> Iterator[Outcome | None]:
    while True:
        outcome = outcomes.get(_TICK_S)
        if isinstance(outcome, StopIteration):
            return
        if isinstance(outcome, BaseException):
            raise outcome
        yield outcome


class _HttpRun:
    """Runs one batch, in one event loop."""

    def __init__(
        self,
        backend: HttpBackend,
        tasks: Iterator[MediaTask],
        outcomes: BoundedQueue[Outcome | BaseException | None],
    ) -> None:
        self._backend = backend
        self._tasks = tasks
        self._outcomes = outcomes
        self._slots = asyncio.Semaphore(backend.max_requests)
        self._num_answered = 0
        self._url = f"{backend.endpoint.url}{backend.path}"
        self._http = httpx.AsyncClient(
            transport=backend.transport,
            trust_env=False,
            headers=backend.endpoint.headers,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S, pool=None),
        )

    async def run(self) -> None:
        """Runs some tasks at once, the next one when one has ended."""
        async with self._http, asyncio.TaskGroup() as group:
            for _ in range(MAX_TASKS):
                group.create_task(self._work())

    async def _work(self) -> None:
        for task in self._tasks:
            await self._answer_all(task)

    async def _answer_all(self, task: MediaTask) -> None:
        """Asks the first question alone, then the others as fast as slots become free."""
        async with self._slots:
            await self._answer(next(task.lines))
        async with asyncio.TaskGroup() as group:
            for line in task.lines:
                await self._slots.acquire()
                asked = group.create_task(self._answer(line))
                asked.add_done_callback(lambda _: self._slots.release())

    async def _answer(self, line: BatchLine) -> None:
        try:
            outcome = await self._outcome(line)
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - what one line meets is that line's
            outcome = Failed.of(line, InternalError.of(error))
        if isinstance(outcome, Answered):
            self._backend.note(outcome.completion)
        await asyncio.to_thread(self._outcomes.put, outcome, 1)

    async def _outcome(self, line: BatchLine) -> Outcome:
        """Returns the answer to a line, after a few attempts.

        One that is refused each time by a server that is well and answers others is at fault itself. Raises
        UnavailableError where it is the server.
        """
        pause_s, num_answered, status = _FIRST_PAUSE_S, self._num_answered, 0
        for _ in range(NUM_TRIES):
            try:
                answer = await self._http.post(self._url, json=self._backend.body_of(line))
            except httpx.HTTPError as error:
                status, reason = 0, type(error).__name__
            else:
                if answer.status_code not in _AGAIN:
                    self._num_answered += 1
                    return _read(line, answer)
                status, reason = answer.status_code, f"status {answer.status_code}"
            await asyncio.sleep(pause_s)
            pause_s *= 2
        shown = f"{self._backend.endpoint.shown_url} gave {reason}, {NUM_TRIES} times in a row"
        if status != HTTPStatus.TOO_MANY_REQUESTS and await self._is_well(num_answered):
            explained = f"{shown}, and answers other lines; ask this one alone, and see the server's log"
            return Failed(
                line, UnavailableError.__name__, explained, status or HTTPStatus.SERVICE_UNAVAILABLE
            )
        raise UnavailableError(f"{shown}; once it answers, run the same command again to continue")

    async def _is_well(self, num_answered: int) -> bool:
        """Returns whether the server takes other lines: it says that it is well, and it has answered some.

        num_answered: lines before the one that was refused. A server that does not say how it is must have
        answered some since.
        """
        try:
            answer = await self._http.get(f"{self._backend.endpoint.url}/health", timeout=_CONNECT_S)
        except httpx.HTTPError:
            return False
        if answer.status_code == HTTPStatus.OK:
            return self._num_answered > 0
        is_unknown = answer.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
        return is_unknown and self._num_answered > num_answered


def _read(line: BatchLine, answer: httpx.Response) -> Outcome:
    try:
        record: Any = answer.json()
    except (ValueError, RecursionError):
        record = None
    if answer.status_code == HTTPStatus.OK and _is_completion(record):
        return Answered(line, record)
    error = record.get("error") if isinstance(record, dict) else None
    error = error if isinstance(error, dict) else {}
    kind = str(error.get("code") or error.get("type") or "server_error")
    message = str(error.get("message") or json.dumps(record)[:200])
    return Failed(line, kind, " ".join(message.split()), answer.status_code)


def _is_completion(record: Any) -> bool:
    try:
        choice = record["choices"][0]
        has_text = isinstance(choice["message"], dict) if "message" in choice else "text" in choice
        return has_text and "finish_reason" in choice
    except (LookupError, TypeError):
        return False
