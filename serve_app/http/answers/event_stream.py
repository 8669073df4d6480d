"""Sends a response of server-sent events that is never silent for long."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import TracebackType
from typing import Self

from starlette.types import Send

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
