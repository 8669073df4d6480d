"""Asks this server's own app from another thread, so that lines of batches are requests like any other."""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import ASGIApp

OWN_URL = "http://localhost"


class AppTransport(httpx.AsyncBaseTransport):
    """Passes requests of any event loop to an app in its own; cancelling one there ends it here."""

    def __init__(self, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> None:
        """Takes the app, and the event loop that it runs in."""
        self._inner = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._loop = loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = asyncio.run_coroutine_threadsafe(self._inner.handle_async_request(request), self._loop)
        return await asyncio.wrap_future(answer)
