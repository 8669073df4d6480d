"""Lets a front listen for HTTP itself, so that no proxy of Serve passes its requests on.

    clients --host:port, shared by the fronts of a machine--> front: the connection and all of its requests

Serve places, watches, scales and updates fronts as ever. With `user_config: {host, port}` of the deployment
a front listens there; without it, requests come through Serve's proxy alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI

from epd.serve_app.http.address import HttpAddress
from epd.serve_app.http.http_server import HttpServer

# In a `user_config`: the command that has deployed the application.
OWNER = "owner"


def front_address(user_config: Mapping[str, object]) -> HttpAddress | None:
    """Returns where fronts listen themselves, None for nowhere. Raises RequestError."""
    place = {key: value for key, value in user_config.items() if key != OWNER}
    return HttpAddress.of(place) if place else None


class FrontListener:
    """Listens for one app. When the app's lifespan ends, requests in flight have `drain_s` to complete."""

    def __init__(self, app: FastAPI, drain_s: float) -> None:
        self._app = app
        self._drain_s = drain_s
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        app_lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with app_lifespan(app):
                try:
                    yield
                finally:
                    await self.close()

        app.router.lifespan_context = lifespan

    async def listen(self, address: HttpAddress | None) -> None:
        """Listens at an address, and no longer at the one before. Raises RequestError."""
        await self.close()
        if address is None:
            return
        listener = address.listen(is_shared=True)
        self._server = HttpServer(self._app, self._drain_s, address.prefix)
        self._serving = asyncio.create_task(_serve(self._server, listener))
        await self._server.listening.wait()

    @property
    def is_healthy(self) -> bool:
        """Returns whether it listens if it is to."""
        return self._serving is None or not self._serving.done()

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections) if self._server is not None else 0

    async def close(self) -> None:
        """Accepts no more connections, and returns when the requests in flight are answered or late."""
        server, serving = self._server, self._serving
        self._server = self._serving = None
        if server is not None and serving is not None:
            server.should_exit = True
            await serving


async def _serve(server: HttpServer, listener: socket.socket) -> None:
    with listener:
        try:
            await server.serve([listener])
        finally:
            for each in server.servers:
                each.close()


class FrontReplica:
    """Does what Serve asks of a front. Its HTTP app is created with it."""

    listener: FrontListener

    async def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Listens where the deployment's `user_config` says; nowhere if it is empty. Raises RequestError."""
        await self.listener.listen(front_address(user_config))

    async def check_health(self) -> None:
        if not self.listener.is_healthy:
            raise RuntimeError("the front does not listen any more")
