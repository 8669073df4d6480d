"""Defines the address that the server listens on, and the path that its requests begin with.

GET /team/v1/models  --UnderPrefix("/team")-->  root_path "/team", so that routes see /v1/models

Ray Serve's proxy does the same for an application.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Self

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


_BACKLOG = 2048
# The address for requests to a server that listens on every interface.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_HOST, _PORT, _MAX_PORT = "127.0.0.1", 8000, 65535


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """prefix: of the path of every request; `/` for none."""

    host: str = _HOST
    port: int = _PORT
    prefix: str = ROOT

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Self:
        """Returns the address that the `user_config` of a deployment names. Raises RequestError."""
        host, port, prefix = (
            config.get(*each) for each in (("host", _HOST), ("port", _PORT), ("prefix", ROOT))
        )
        is_known = config.keys() <= {"host", "port", "prefix"} and isinstance(prefix, str)
        if is_known and isinstance(host, str) and isinstance(port, int) and 0 < port <= _MAX_PORT:
            return cls(host, port, checked_prefix(str(prefix)))
        raise RequestError(
            f"received the user_config {dict(config)!r}; allowed: host, an address of the machine, "
            f"port, 1 to {_MAX_PORT}, and prefix, a path; change it"
        )

    @classmethod
    def free(cls) -> Self:
        """Returns a loopback address that nobody listened on a moment ago."""
        with socket.create_server((_HOST, 0)) as listener:
            return cls(_HOST, listener.getsockname()[1])

    @property
    def config(self) -> dict[str, object]:
        """Returns what `of` takes."""
        place: dict[str, object] = {"host": self.host, "port": self.port}
        return place if self.prefix == ROOT else place | {"prefix": self.prefix}

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.prefix.rstrip(ROOT)}"

    @property
    def own_url(self) -> str:
        """Returns the URL for requests from this machine."""
        return replace(self, host=_LOOPBACK.get(self.host, self.host)).url

    @property
    def _family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def listen(self, *, is_shared: bool = False) -> socket.socket:
        """Opens a listening socket. Raises RequestError if that is impossible at the address.

        is_shared: whether other processes of the same user may listen there too, if they share it as well:
            each gets a part of the connections
        """
        try:
            return socket.create_server(
                (self.host, self.port), family=self._family, backlog=_BACKLOG, reuse_port=is_shared
            )
        except OSError as error:
            raise self._refusal(error) from error

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keeps the address for those who share it while open. Raises RequestError if another has it."""
        self.listen().close()
        with socket.socket(self._family) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                held.bind((self.host, self.port))
            except OSError as error:
                raise self._refusal(error) from error
            yield

    def _refusal(self, error: OSError) -> RequestError:
        reason = (error.strerror or str(error)).partition(" (while")[0]  # which Python adds
        return RequestError(
            f"cannot listen on {self.host}:{self.port}: {reason}; give another --port, or end the "
            "program there"
        )
