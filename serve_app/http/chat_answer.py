"""Runs the answer to a chat request as an ASGI response, and stops it when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from epd.errors import EPDError, http_status
from serve_app.http.event_stream import EventStream
from serve_app.http.http_guard import bug_reply, error_reply
from serve_app.http.responses import DONE, ChunkBuilder, CompletionBuilder, checked_end, event
from serve_app.http.server_state import ParsedRequest, ServerState
from serve_app.http.tools import offers_tools
from serve_app.observability.record import CLIENT_GONE, RequestRecord, server_timing
from serve_app.service import AnswerItem


class ChatAnswer(Response):
    """Sends a completion or a stream of chunks. Errors before the first bytes are raised."""

    def __init__(self, server: ServerState, parsed: ParsedRequest, record: RequestRecord) -> None:
        super().__init__()
        chat = parsed.chat
        self._record = record
        self._num_choices = chat.n or 1
        self._has_logprobs = bool(chat.logprobs)
        self._reads_tools = offers_tools(chat)
        options = chat.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._counts_on = self._includes_usage and bool(options and options.continuous_usage_stats)
        self._keep_alive_s = server.settings.keep_alive_s
        self._items = server.items(parsed, record)

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
        builder = CompletionBuilder(
            self._record,
            self._num_choices,
            has_logprobs=self._has_logprobs,
            reads_tools=self._reads_tools,
        )
        async with aclosing(self._items) as answer:
            async for items in answer:
                for item in items:
                    builder.add(item)
        completion = builder.build()
        headers = {"Server-Timing": server_timing(checked_end(self._record.end))}
        body = completion.model_dump_json()
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async with EventStream(send, self._keep_alive_s) as stream:
            async with aclosing(self._items) as answer:
                await self._relay(answer, stream)
            await stream.end()

    async def _relay(self, answer: AsyncIterator[Sequence[AnswerItem]], stream: EventStream) -> None:
        """Relays all items. Errors are raised before the first bytes; after them, sent as the last event."""
        try:
            await self._send_events(answer, stream)
        except EPDError as error:
            if not stream.has_begun:
                raise
            self._record.status, self._record.error = http_status(error), type(error).__name__
            await stream.write(event(error_reply(error)))
        except Exception:
            if stream.has_begun:
                await stream.write(event(bug_reply(self._record)))
            raise

    async def _send_events(self, answer: AsyncIterator[Sequence[AnswerItem]], stream: EventStream) -> None:
        """Sends all chunks of items that are ready together in one write."""
        builder = ChunkBuilder(
            self._record,
            includes_usage=self._includes_usage,
            counts_on=self._counts_on,
            has_logprobs=self._has_logprobs,
            reads_tools=self._reads_tools,
        )
        async for items in answer:
            if data := b"".join([builder.events(item) for item in items]):
                await stream.write(data)
        await stream.write(b"".join(event(chunk) for chunk in builder.last_chunks()) + DONE)


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
