"""Answers `epd batch` with servers of the OpenAI chat API, questions about the same media together.

    media a   first question | the others, at once
    media b         first question | the others, at once

The first question brings the media into the server's caches; the others find them there. Requests that are
refused for load, or lost with a connection or behind a proxy, are retried. One that is refused repeatedly
while others are answered counts as a failure of its line.

Of several servers, each medium has one that is asked first (rendezvous hashing), so that its caches are found
again; the next one is asked where that one does not answer. A server with a free place looks some media ahead
for one of its own, and takes one of another only where that one has many left. Workers that join a server
during the run bring it more places.

Source: Thaler and Ravishankar, 1998.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from importlib import import_module, util
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

import httpx

from epd.batch.in_flight import MAX_REQUESTS, MAX_TASKS, InFlight, num_workers
from epd.batch.lines import CHAT_URL, JSON, BatchLine
from epd.batch.object_urls import with_urls
from epd.batch.shared_prefix import shared_prefix
from epd.batch.tasks import Answered, BackendCounts, Failed, MediaTask, Outcome, outcome_of
from epd.client.endpoint import Endpoint, get, parse_endpoints
from epd.errors import InternalError, UnavailableError

MAX_OUTCOMES = 1024
NUM_TRIES = 6
_MAX_AHEAD = 16  # media for each server that are looked at for one of its own
_TICK_S = 0.1
# Whose event loop sends: asyncio's takes several times the CPU for media.
_LOOPS = "uvloop" if util.find_spec("uvloop") else "asyncio"
_CONNECT_S = 30.0
_TIMEOUT_S = 3600.0
_FIRST_PAUSE_S = 0.5
_LOST_S = 10.0  # a server that did not answer is asked last
_LOOK_S = 10.0  # between two looks at the workers of servers
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
        *endpoints: Endpoint,
        path: str = CHAT_URL,
        transport: httpx.AsyncBaseTransport | None = None,
        in_flight: InFlight | None = None,
        has_seeds: bool = False,
        signs: bool = False,
    ) -> None:
        """Takes one or more servers.

        path: that is asked.
        transport: if not TCP.
        in_flight: by default some media and lines for each server.
        has_seeds: whether lines without a seed get one that is the same whenever they are repeated.
        signs: whether media in object stores are read with the credentials of this process.
        """
        self.endpoints = endpoints
        self._has_seeds = has_seeds
        self._signs = signs
        self.path = path
        self.transport = transport
        number = len(endpoints)
        self.in_flight = in_flight or InFlight(MAX_TASKS * number, MAX_REQUESTS * number)
        self.num_in_flight = 0
        self._busy_s: dict[str, float] = {}
        self._num_cold = 0

    @classmethod
    @contextmanager
    def open(
        cls,
        urls: str | Sequence[str],
        api_key: str | None,
        media_in_flight: int | None = None,
        lines_per_medium: float = math.inf,
        **options: Any,
    ) -> Iterator[HttpBackend]:
        """Opens servers.

        media_in_flight: by default some for each worker that prefills, also for those that join later.
        lines_per_medium: mean of the input, which decides how many.
        Raises RequestError for an invalid URL, UnavailableError when no server answers.
        """
        lost: list[UnavailableError] = []
        endpoints = parse_endpoints([urls] if isinstance(urls, str) else urls, api_key=api_key)
        for endpoint in endpoints:
            try:
                get(endpoint, "/v1/models", "start the server, or give its --api-key")
            except UnavailableError as error:
                lost.append(error)
        if len(lost) == len(endpoints):
            raise lost[0]
        in_flight = InFlight.at(endpoints, lines_per_medium, media_in_flight)
        yield cls(*endpoints, signs=True, in_flight=in_flight, **options)

    @property
    def max_tasks(self) -> int:
        return self.in_flight.media

    @contextmanager
    def run(self, tasks: Iterator[MediaTask]) -> Iterator[Iterator[Outcome | None]]:
        outcomes: SimpleQueue[Outcome | BaseException] = SimpleQueue()
        room = asyncio.Semaphore(MAX_OUTCOMES)
        loop: asyncio.AbstractEventLoop = import_module(_LOOPS).new_event_loop()

        async def put(outcome: Outcome) -> None:
            await room.acquire()
            outcomes.put(outcome)

        work = loop.create_task(_HttpRun(self, tasks, put).run())
        thread = threading.Thread(target=_worked, args=(loop, work, outcomes), name="batch-http", daemon=True)
        thread.start()
        try:
            yield _outcomes(outcomes, partial(loop.call_soon_threadsafe, room.release))
        finally:
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

    def body_of(self, line: BatchLine) -> JSON:
        """Returns what is sent for a line. Raises RequestError for a URI of an object store that is none."""
        is_complete = not self._has_seeds or line.body.get("seed") is not None
        body = line.body if is_complete else {**line.body, "seed": _seed(line.key)}
        return with_urls(body) if self._signs else body

    def busy_s(self) -> Mapping[str, float]:
        return dict(self._busy_s)

    def counts(self) -> BackendCounts:
        """Counts lines for which something was encoded; the server does not report media."""
        return BackendCounts(self._num_cold)


def _seed(key: str) -> int:
    """Returns a seed that is the same whenever the line is repeated."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=_SEED_BYTES).digest()) >> 1


def _worked(
    loop: asyncio.AbstractEventLoop, work: asyncio.Task[None], outcomes: SimpleQueue[Outcome | BaseException]
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
    outcomes.put(error or StopIteration())


def _outcomes(
    outcomes: SimpleQueue[Outcome | BaseException], taken: Callable[[], object]
) -> Iterator[Outcome | None]:
    """Yields what comes, and None where nothing does for a while. taken: called for each."""
    while True:
        try:
            outcome = outcomes.get(timeout=_TICK_S)
        except Empty:
            yield None
            continue
        if isinstance(outcome, StopIteration):
            return
        if isinstance(outcome, BaseException):
            raise outcome
        with suppress(RuntimeError):  # the loop may be over
            taken()
        yield outcome


class Asker:
    """Asks the servers of a backend, in one event loop, line by line."""

    def __init__(self, backend: HttpBackend) -> None:
        self._backend = backend
        self._num_answered = 0
        self._slots = asyncio.Semaphore(backend.in_flight.lines)
        self._lost_s: dict[str, float] = {}
        self._http = httpx.AsyncClient(
            transport=backend.transport,
            trust_env=False,
            headers=backend.endpoints[0].headers,
            timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S, pool=None),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def answer_all(
        self,
        lines: Iterator[BatchLine],
        put: Callable[[Outcome], Awaitable[None]],
        first: Endpoint | None = None,
    ) -> None:
        """Asks the first question alone, then the others as fast as slots become free.

        first: the server that is asked before others; None for that of the media.
        """

        async def answer(line: BatchLine) -> None:
            await put(await self.ask(line, first))

        async with self._slots:
            await answer(next(lines))
        async with asyncio.TaskGroup() as group:
            for line in lines:
                await self._slots.acquire()
                asked = group.create_task(answer(line))
                asked.add_done_callback(lambda _: self._slots.release())

    async def ask(self, line: BatchLine, first: Endpoint | None = None) -> Outcome:
        """Returns the outcome of a line. Raises UnavailableError when no server can answer any line."""
        self._backend.num_in_flight += 1
        try:
            outcome = await self._outcome(line, first)
        except UnavailableError:
            raise
        except Exception as error:  # noqa: BLE001 - what one line meets is that line's
            outcome = Failed.of(line, InternalError.of(error))
        finally:
            self._backend.num_in_flight -= 1
        if isinstance(outcome, Answered):
            self._backend.note(outcome.completion)
        return outcome

    async def _outcome(self, line: BatchLine, first: Endpoint | None) -> Outcome:
        """Returns the answer to a line, after a few attempts at each server.

        One that is refused each time by servers of which one is well and answers others is at fault itself.
        Raises UnavailableError where it is the servers.
        """
        pause_s, num_answered, status = _FIRST_PAUSE_S, self._num_answered, 0
        for _ in range(NUM_TRIES):
            for endpoint in self.ranked(line, first):
                try:
                    url = f"{endpoint.url}{self._backend.path}"
                    answer = await self._http.post(url, json=self._backend.body_of(line))
                except httpx.HTTPError as error:
                    status, reason = 0, type(error).__name__
                    self._lost_s[endpoint.url] = time.monotonic()
                else:
                    if answer.status_code not in _AGAIN and not _is_of_proxy(answer):
                        self._num_answered += 1
                        return outcome_of(line, answer.status_code, _record(answer))
                    status, reason = answer.status_code, f"status {answer.status_code}"
                shown = f"{endpoint.shown_url} gave {reason}, {NUM_TRIES} times in a row"
            await asyncio.sleep(pause_s)
            pause_s *= 2
        if status != HTTPStatus.TOO_MANY_REQUESTS and await self._is_well(num_answered):
            explained = f"{shown}, and answers other lines; ask this one alone, and see the server's log"
            return Failed(
                line, UnavailableError.__name__, explained, status or HTTPStatus.SERVICE_UNAVAILABLE
            )
        raise UnavailableError(f"{shown}; once it answers, run the same command again to continue")

    def ranked(self, line: BatchLine, first: Endpoint | None = None) -> Sequence[Endpoint]:
        """Returns the servers in the order of the line's media, `first` before them.

        Those that were just lost come last.
        """
        endpoints = self._backend.endpoints
        if len(endpoints) == 1:
            return endpoints
        media = "\n".join(shared_prefix(line.body).urls)
        since_s = time.monotonic() - _LOST_S
        return sorted(
            endpoints,
            key=lambda each: (
                self._lost_s.get(each.url, -math.inf) > since_s,
                each is not first,
                hashlib.blake2b(f"{each.name} {media}".encode("utf-8", "surrogatepass")).digest(),
            ),
        )

    async def _is_well(self, num_answered: int) -> bool:
        """Returns whether a server takes other lines: it says that it is well, and lines were answered.

        num_answered: lines before the one that was refused. Of servers that do not say how they are, some
            line must have been answered since.
        """
        states = await asyncio.gather(*map(self._health, self._backend.endpoints))
        if HTTPStatus.OK in states:
            return self._num_answered > 0
        is_unknown = HTTPStatus.NOT_FOUND in states or HTTPStatus.METHOD_NOT_ALLOWED in states
        return is_unknown and self._num_answered > num_answered

    def add_slots(self, number: int) -> None:
        for _ in range(number):
            self._slots.release()

    async def _health(self, endpoint: Endpoint) -> int:
        """Returns the status of a server's health, 0 without an answer."""
        try:
            return (await self._http.get(f"{endpoint.url}/health", timeout=_CONNECT_S)).status_code
        except httpx.HTTPError:
            return 0


class _HttpRun:
    """Runs one batch, in one event loop."""

    def __init__(
        self, backend: HttpBackend, tasks: Iterator[MediaTask], put: Callable[[Outcome], Awaitable[None]]
    ) -> None:
        """put: takes outcomes, and waits while there are too many."""
        self._asker = Asker(backend)
        self._endpoints = backend.endpoints
        self._max_tasks = backend.max_tasks
        self._in_flight = backend.in_flight
        self._following: asyncio.Task[None] | None = None
        self._tasks = tasks
        self._ahead: dict[str, deque[Iterator[BatchLine]]] = {each.url: deque() for each in self._endpoints}
        self._is_drained = False  # of tasks
        self._put = put

    async def run(self) -> None:
        """Runs some tasks at once at each server, the next one when one has ended."""
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(self._max_tasks):
                    group.create_task(self._work(self._endpoints[place % len(self._endpoints)]))
                if self._in_flight.num_workers:
                    self._following = group.create_task(self._follow(group))
        finally:
            await self._asker.close()

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        """Gives places to workers that join, until all media are given."""
        most, in_flight = list(self._in_flight.num_workers), self._in_flight
        while True:
            await asyncio.sleep(_LOOK_S)
            for place, endpoint in enumerate(self._endpoints):
                joined = max(0, await asyncio.to_thread(num_workers, endpoint) - most[place])
                most[place] += joined
                self._asker.add_slots(in_flight.lines_of_worker * joined)
                self._max_tasks += in_flight.media_of_worker * joined
                for _ in range(in_flight.media_of_worker * joined):
                    group.create_task(self._work(endpoint))

    async def _work(self, endpoint: Endpoint) -> None:
        first = endpoint if len(self._endpoints) > 1 else None
        while (lines := self._taken(endpoint)) is not None:
            await self._asker.answer_all(lines, self._put, first)
        if self._following is not None:
            self._following.cancel()

    def _taken(self, endpoint: Endpoint) -> Iterator[BatchLine] | None:
        """Returns the lines of the next task of a server, or of another that has more ahead than places."""
        if len(self._endpoints) == 1:
            task = next(self._tasks, None)
            return None if task is None else task.lines
        own = self._ahead[endpoint.url]
        while not own and sum(map(len, self._ahead.values())) < _MAX_AHEAD * len(self._endpoints):
            if (task := next(self._tasks, None)) is None:
                self._is_drained = True
                break
            line = next(task.lines)
            self._ahead[self._asker.ranked(line)[0].url].append(chain([line], task.lines))
        if own:
            return own.popleft()
        most = max(self._ahead.values(), key=len)
        has_room = self._is_drained and len(most) * len(self._endpoints) <= self._max_tasks
        return None if has_room else most.popleft()


def _record(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def _is_of_proxy(answer: httpx.Response) -> bool:
    """Returns whether a proxy answered that has lost the server, such as Ray Serve's: in plain text."""
    is_error = answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    return is_error and not isinstance(_record(answer), dict)
