"""Answers below a path of the server's address, as Ray Serve's proxy does for an application.

GET /team/v1/models  --UnderPrefix("/team")-->  root_path "/team", so that routes see /v1/models
"""

from __future__ import annotations

import re
from http import HTTPStatus

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from epd.errors import RequestError

ROOT = "/"
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+){1,16}")
_MAX_LENGTH = 200


def checked_prefix(prefix: str) -> str:
    """Returns the prefix. Raises RequestError for what is no path without an end in `/`."""
    if prefix == ROOT or (len(prefix) <= _MAX_LENGTH and _PREFIX.fullmatch(prefix)):
        return prefix
    raise RequestError(
        f"received the route prefix {prefix[:_MAX_LENGTH]!r}; allowed: / or a path such as /team, of "
        "letters, digits and ._~- and without a / at its end; change --route-prefix"
    )


def under_prefix(app: ASGIApp, prefix: str) -> ASGIApp:
    """Returns the app for paths that begin with the prefix; the app itself below `/`."""
    return app if prefix == ROOT else _UnderPrefix(app, prefix)


def route_path(scope: Scope) -> str:
    """Returns the path of a request without the prefix that the server, or Serve's proxy, has named."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class _UnderPrefix:
    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or f"{scope['path']}/".startswith(f"{self._prefix}/"):
            await self._app({**scope, "root_path": self._prefix}, receive, send)
            return
        missing = f"not found; this server answers below {self._prefix}/\n"
        await PlainTextResponse(missing, HTTPStatus.NOT_FOUND)(scope, receive, send)
