"""Asks this server's own app from other threads, so that lines of batches are requests like any other."""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from epd.serve_app.clients import Client, driver_of
from epd.serve_app.fair_threads import FairTurns

OWN_URL = "http://localhost"


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
