"""The ASGI response of a chat request: runs the answer, and stops it when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epd.errors import EPDError, http_status
from serve_app.front import FrontDoor
from serve_app.http_guard import bug_reply, error_reply
from serve_app.protocol import ChatRequest
from serve_app.record import CLIENT_GONE, RequestRecord, server_timing
from serve_app.replies import DONE, ChunkBuilder, CompletionBuilder, checked_end, event
from serve_app.service import AnswerItem

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChatAnswer(Response):
    """A completion or a stream of chunks. Errors before the first item are raised, later ones are sent."""

    def __init__(self, front: FrontDoor, chat: ChatRequest, record: RequestRecord) -> None:
        super().__init__()
        self._record = record
        self._num_choices = chat.n or 1
        self._has_logprobs = bool(chat.logprobs)
        self._includes_usage = bool(chat.stream_options and chat.stream_options.include_usage)
        self._items = front.items(chat, record)

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
        builder = CompletionBuilder(self._record, self._num_choices, has_logprobs=self._has_logprobs)
        async with aclosing(self._items) as items:
            async for item in items:
                builder.add(item)
        completion = builder.build()
        headers = {"Server-Timing": server_timing(checked_end(self._record.end))}
        body = completion.model_dump_json()
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """The status is sent with the first item, so that a refusal has a status of its own."""
        builder = ChunkBuilder(
            self._record, includes_usage=self._includes_usage, has_logprobs=self._has_logprobs
        )
        async with aclosing(self._items) as items:
            first = await anext(items, None)
            if first is None:
                checked_end(None)
                return
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _STREAM_HEADERS})
            await self._send_events(builder, first, items, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(
        self,
        builder: ChunkBuilder,
        first: AnswerItem,
        items: AsyncGenerator[AnswerItem, None],
        send: Send,
    ) -> None:
        try:
            await _send_chunks(builder, first, send)
            async for item in items:
                await _send_chunks(builder, item, send)
            for chunk in builder.last_chunks():
                await _send(event(chunk), send)
            await _send(DONE, send)
        except EPDError as error:
            self._record.status, self._record.error = http_status(error), type(error).__name__
            await _send(event(error_reply(error)), send)
        except Exception:
            await _send(event(bug_reply(self._record)), send)
            raise


async def _send_chunks(builder: ChunkBuilder, item: AnswerItem, send: Send) -> None:
    """All chunks of an item in one write."""
    if data := b"".join(event(chunk) for chunk in builder.chunks(item)):
        await _send(data, send)


async def _send(data: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Whether the work ended before the client went away, which cancels it. Raises what the work raises."""
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
