"""Sends one chat request and notes when each piece of the answer comes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from epd.client.body import STREAM_HEADERS, Body, SSEParser
from epd.client.endpoint import Endpoint

_DETAIL_CHARS = 300
# Below what servers keep idle connections for (uvicorn: 5 s), so that none is used that is being closed.
_KEEPALIVE_S = 2.0
_CONNECT_TIMEOUT_S = 30.0
_PRIME_TIMEOUT_S = 5.0


class AnswerError(Exception):
    """Reports an invalid or failed answer. kind: a few words that can be counted."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = " ".join(detail.split())[:_DETAIL_CHARS]


@dataclass(slots=True)
class ChatReply:
    """Collects one answer as it arrives; seconds on the client's clock."""

    sent_s: float
    end_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: AnswerError | None = None
    is_finished: bool = False

    def take(self, data: str, now_s: float) -> None:
        """Notes one event. Raises AnswerError for an error in the stream and for an invalid chat chunk."""
        if data == "[DONE]":
            self.is_finished = True
            return
        try:
            self.take_chunk(_chunk(data), now_s)
        except (AttributeError, TypeError):
            raise AnswerError("malformed event", data) from None

    def take_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        """Notes one chat chunk."""
        self._take_usage(chunk.get("usage"))
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            ends = choice.get("finish_reason") is not None
            has_text = any(
                delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")
            )
            # An answer without any text still has a moment at which it is known.
            if has_text or (ends and not self.token_times_s):
                self.token_times_s.append(now_s)
            self.is_finished |= ends

    def _take_usage(self, usage: dict[str, Any] | None) -> None:
        if usage:
            self.prompt_tokens = usage.get("prompt_tokens")
            self.completion_tokens = usage.get("completion_tokens")


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        raise AnswerError("malformed event", data) from None
    if not isinstance(chunk, dict):
        raise AnswerError("malformed event", data)
    if error := chunk.get("error"):
        raise AnswerError(
            "error in stream", error.get("message", "") if isinstance(error, dict) else str(error)
        )
    return chunk


class ChatClient:
    """Keeps connections to one endpoint."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        # Proxies of the environment would be measured too.
        self._http = httpx.AsyncClient(
            trust_env=False,
            headers={**endpoint.headers, **STREAM_HEADERS},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S), pool=None),
            limits=httpx.Limits(keepalive_expiry=_KEEPALIVE_S),
        )

    async def __aenter__(self) -> Self:
        # A process's first request pays for lazy imports and for finding the host: this one does.
        with suppress(httpx.HTTPError):
            await self._http.get(f"{self.endpoint.url}/v1/models", timeout=_PRIME_TIMEOUT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    def now_s(self) -> float:
        """Returns seconds on a monotonic clock."""
        return time.perf_counter()

    async def ask(self, body: Body) -> ChatReply:
        """Sends a request now and reads its answer to the end, despite any errors."""
        reply = ChatReply(self.now_s())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, reply)
        except AnswerError as error:
            reply.error = error
        except (TimeoutError, httpx.TimeoutException):
            reply.error = AnswerError("timeout", f"no end within {self._timeout_s:g} s")
        except httpx.ConnectError as error:
            reply.error = AnswerError("connection refused", str(error))
        except httpx.HTTPError as error:
            reply.error = AnswerError("connection cut", repr(error))
        reply.end_s = self.now_s()
        return reply

    async def _stream(self, body: Body, reply: ChatReply) -> None:
        url = f"{self.endpoint.url}/v1/chat/completions"
        headers = {"Content-Length": str(body.num_bytes)}
        async with self._http.stream("POST", url, content=_pieces(body), headers=headers) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                raise AnswerError(f"HTTP {answer.status_code}", text)
            parser = SSEParser()
            async for piece in answer.aiter_raw():
                now_s = self.now_s()
                for data in parser.feed(piece):
                    reply.take(data, now_s)
        if not reply.is_finished:
            raise AnswerError("connection cut", "the stream ended before the answer did")


async def _pieces(body: Body) -> AsyncIterator[bytes]:
    for piece in body.pieces:
        yield piece
