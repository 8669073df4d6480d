"""Sends an answer as an ASGI response, whole or as events, and stops it when the client disconnects.

Events are never silent for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from http import HTTPStatus
from types import TracebackType
from typing import Any, Protocol, Self

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epd.errors import EPDError, http_status
from epd.serve_app.http.answers.responses import checked_end
from epd.serve_app.http.guard.http_guard import bug_reply, error_reply
from epd.serve_app.http.protocol import ErrorReply
from epd.serve_app.observability.record import CLIENT_GONE, RequestRecord, server_timing
from epd.serve_app.service import AnswerItem

KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Sends the status with the first bytes, so that an error before them has a status of its own.

    After keep_alive_s seconds without an event it sends a comment, which clients ignore: proxies cut
    connections that are silent while a long video is processed. Only whole events are written.
    """

    def __init__(self, send: Send, keep_alive_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._lock = asyncio.Lock()
        self._keep_alive_task: asyncio.Task[None] | None = None
        self._wrote_s = 0.0
        self.has_begun = False

    async def __aenter__(self) -> Self:
        self._wrote_s = asyncio.get_running_loop().time()
        self._keep_alive_task = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def write(self, data: bytes) -> None:
        async with self._lock:
            if not self.has_begun:
                self.has_begun = True
                await self._send(
                    {"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS}
                )
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._wrote_s = asyncio.get_running_loop().time()

    async def end(self) -> None:
        """Ends the stream; nothing is awaited afterwards, when the server reports that the client is gone."""
        async with self._lock:  # no comment is cut off
            await self._stop()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stop(self) -> None:
        if self._keep_alive_task is not None:
            self._keep_alive_task.cancel()
            await asyncio.gather(self._keep_alive_task, return_exceptions=True)
            self._keep_alive_task = None

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle_s = loop.time() - self._wrote_s
            if idle_s >= self._keep_alive_s:
                await self.write(KEEP_ALIVE)
            else:
                await asyncio.sleep(self._keep_alive_s - idle_s)


class WholeAnswer(Protocol):
    """Gathers the items of an answer into one body."""

    def add(self, item: AnswerItem) -> None: ...

    def body(self) -> str:
        """Returns the JSON of the whole. Raises EPDError if the answer stopped without its end."""
        ...


class AnswerEvents(Protocol):
    """Turns the items of an answer into server-sent events."""

    def events(self, item: AnswerItem) -> bytes: ...

    def last_events(self) -> bytes:
        """Returns what ends the stream. Raises EPDError if the answer stopped without its end."""
        ...

    def error_event(self, error: ErrorReply) -> bytes:
        """Returns what ends a stream that has begun and cannot be completed."""
        ...


class AnswerResponse(Response):
    """Sends an answer. Errors before the first bytes are raised."""

    def __init__(
        self,
        whole: Callable[[], WholeAnswer],
        events: Callable[[], AnswerEvents],
        items: AsyncGenerator[Sequence[AnswerItem], None],
        record: RequestRecord,
        keep_alive_s: float,
    ) -> None:
        """Takes items: of the answer, closed with it.

        whole, events: make what builds it, at once or as a stream
        """
        super().__init__()
        self._whole, self._events = whole, events
        self._items = items
        self._record = record
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream(send) if self._record.is_stream else self._complete(scope, receive, send)
        try:
            if not await _until_disconnect(answer, receive):
                self._record.status, self._record.error = CLIENT_GONE, "disconnected"
        except asyncio.CancelledError:
            self._record.status, self._record.error = CLIENT_GONE, "cancelled"
            raise
        except EPDError as error:
            self._record.error = type(error).__name__
            raise

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        builder = self._whole()
        async with aclosing(self._items) as answer:
            async for items in answer:
                for item in items:
                    builder.add(item)
        body = builder.body()
        headers = {"Server-Timing": server_timing(checked_end(self._record.end))}
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async with EventStream(send, self._keep_alive_s) as stream:
            async with aclosing(self._items) as answer:
                await self._relay(answer, stream)
            await stream.end()

    async def _relay(self, answer: AsyncIterator[Sequence[AnswerItem]], stream: EventStream) -> None:
        """Relays all items. Errors are raised before the first bytes; after them, sent as the last event."""
        builder = self._events()
        try:
            await _send_events(answer, builder, stream)
        except EPDError as error:
            if not stream.has_begun:
                raise
            self._record.status, self._record.error = http_status(error), type(error).__name__
            await stream.write(builder.error_event(error_reply(error)))
        except Exception:
            if stream.has_begun:
                await stream.write(builder.error_event(bug_reply(self._record)))
            raise


async def _send_events(
    answer: AsyncIterator[Sequence[AnswerItem]], builder: AnswerEvents, stream: EventStream
) -> None:
    """Sends the events of items that are ready together in one write."""
    async for items in answer:
        if data := b"".join([builder.events(item) for item in items]):
            await stream.write(data)
    await stream.write(builder.last_events())


async def _until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Runs work until the client disconnects. Returns whether it completed; raises its errors."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
