"""An OpenAI chat server that takes as long as it is told to: on loopback, or in the time of an event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Self

import httpx


@dataclass(frozen=True, slots=True)
class Manner:
    """How requests are answered.

    media_ttft_s: of requests with media, in addition. status: other than 200 refuses at once.
    cut_after: closes the connection after so many tokens.
    error_after: puts an error into the stream after so many tokens. tokens_per_event: text of one event.
    wants_new_limit: refuses max_tokens, as OpenAI does for newer models.
    """

    ttft_s: float = 0.05
    media_ttft_s: float = 0.0
    gap_s: float = 0.01
    tokens_per_event: int = 1
    status: int = 200
    cut_after: int | None = None
    error_after: int | None = None
    is_garbage: bool = False
    has_usage: bool = True
    wants_new_limit: bool = False


@dataclass(slots=True)
class FakeServer:
    """Answers /v1/models and /v1/chat/completions; `bodies` are the requests it got.

    Entered, it listens on loopback, in a thread of its own.
    """

    manner: Manner = field(default_factory=Manner)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    url: str = ""
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(started),))
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def behave(self, **changes: Any) -> None:
        self.manner = replace(self.manner, **changes)

    def reply(self, head: str, data: bytes) -> tuple[int, AsyncIterator[bytes]]:
        """Notes a request for an answer. Returns the status, and the pieces of the body as they are sent."""
        self.bodies.append(json.loads(data))
        self.headers.append(head)
        body, manner = self.bodies[-1], self.manner
        if manner.wants_new_limit and "max_completion_tokens" not in body:
            text = "Unsupported parameter: 'max_tokens' is not supported with this model. "
            text += "Use 'max_completion_tokens' instead."
            error = {"message": text, "type": "invalid_request_error", "param": "max_tokens"}
            return 400, _whole(json.dumps({"error": error}).encode())
        if manner.status != 200:
            return manner.status, _whole(b'{"error": {"message": "no room"}}')
        return 200, _answer(body, manner)

    async def _serve(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await self._stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; False when the connection is over."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line[15:] for line in head.splitlines() if line.lower().startswith("content-length:")]
        data = await reader.readexactly(int(lengths[0])) if lengths else b""
        if head.startswith("GET /v1/models "):
            _write(writer, 200, b'{"data": [{"id": "fake"}]}')
            return True
        status, pieces = self.reply(head, data)
        if status != 200:
            _write(writer, status, b"".join([piece async for piece in pieces]))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        async with aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                writer.write(piece)
                await writer.drain()
        return False


class FakeServers(httpx.AsyncBaseTransport):
    """Brings requests to servers without a socket: an answer takes time of the loop that asks, no other."""

    def __init__(self) -> None:
        self._servers: dict[str, FakeServer] = {}

    def add(self, **manner: Any) -> FakeServer:
        """Returns one more server, which is not to be entered."""
        host = f"fake{len(self._servers)}"
        server = self._servers[host] = FakeServer(Manner(**manner), url=f"http://{host}")
        return server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        data = await request.aread()
        status, pieces = self._servers[request.url.host].reply(str(request.headers), data)
        return httpx.Response(status, stream=_Stream(pieces))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _answer(body: dict[str, Any], manner: Manner) -> AsyncIterator[bytes]:
    """Yields the events of an answer; it breaks off where the connection is to be cut."""
    yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    has_media = isinstance(body["messages"][0]["content"], list)
    await asyncio.sleep(manner.ttft_s + has_media * manner.media_ttft_s)
    num_tokens = body.get("max_tokens") or body["max_completion_tokens"]
    text = "word " * manner.tokens_per_event
    for index in range(0, num_tokens, manner.tokens_per_event):
        if index:
            await asyncio.sleep(manner.gap_s)
        if index == manner.cut_after:
            return
        if index == manner.error_after:
            yield _event({"error": {"message": "the engine died", "code": 500}})
            return
        garbage = b"data: {what?\n\n" if manner.is_garbage else b""
        yield garbage + _event({"choices": [{"index": 0, "delta": {"content": text}}]})
    end = _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    if manner.has_usage:
        usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
        end += _event({"choices": [], "usage": usage})
    yield end + b"data: [DONE]\n\n"


def _event(record: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(record)}\n\n".encode()


def _write(writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
