"""Defines the address that the server listens on, the path that its requests begin with, and its names.

GET /team/v1/models  --UnderPrefix("/team")-->  root_path "/team", so that routes see /v1/models

Ray Serve's proxy does the same for an application.

Host headers are checked against DNS rebinding, which reaches a loopback server under an attacker's name: a
page at http://evil.example whose name suddenly resolves to 127.0.0.1 may read answers of a server there as
its own. Its requests still carry `Host: evil.example`, so a server that knows its names can detect them. An
address cannot be rebound, and is always allowed.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
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


# Clients choose the names they send: 64 of them, of the size of a header, are the most that is kept.
_MAX_KNOWN_NAMES = 64


class HostCheck:
    """Decides whether a request may be answered under the name it calls the server by."""

    def __init__(self, names: Iterable[str] | None = None, *, has_key: bool = False) -> None:
        """Takes names that clients may use, beside localhost and addresses; ".NAME" is any host below NAME.

        Without names, a request over a loopback address must use localhost or an address, unless a key
        protects the server; one over another address may use any name, as this machine's are not known here.
        Raises RequestError for an invalid host name.
        """
        self._names = None if names is None else checked_hosts(names)
        self._has_key = has_key

    def allows(self, scope: Scope) -> bool:
        if self._names is not None:
            return _has_allowed_host(scope, self._names)
        return self._has_key or not _is_over_loopback(scope) or _has_allowed_host(scope, frozenset())


def checked_hosts(names: Iterable[str]) -> frozenset[str]:
    """Returns the names in lower case. Raises RequestError for an invalid host name."""
    return frozenset(_checked(name) for name in names)


def names_for(host: str, allowed: Collection[str], *, has_key: bool) -> frozenset[str] | None:
    """Returns the names that a server bound to host answers to, including host. Raises RequestError.

    Returns None if they depend on the address that a request comes to, see `HostCheck`.
    """
    if allowed or not (has_key or is_address(host)):
        return checked_hosts(allowed) | {host.lower()}
    return None


def _checked(name: str) -> str:
    if not name.strip(".") or any(letter in name for letter in "/:*, "):
        raise RequestError(
            f"received the host {name[:100]!r}; allowed: NAME, or .NAME for every host below it; "
            "give it without scheme and port"
        )
    return name.lower().rstrip(".")


def _has_allowed_host(scope: Scope, allowed: frozenset[str]) -> bool:
    """Returns whether every Host header is allowed. A request without any is not from a browser."""
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return all(_is_allowed(_name_of(value), allowed) for value in values)


def _is_allowed(name: str, allowed: frozenset[str]) -> bool:
    if is_address(name) or name == "localhost" or name.endswith(".localhost") or name in allowed:
        return True
    return any(one.startswith(".") and name.endswith(one) for one in allowed)


def _name_of(value: str) -> str:
    """Returns the host name without the port, and without the brackets of an IPv6 address."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].lower().removesuffix(".")


@lru_cache(_MAX_KNOWN_NAMES)
def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_over_loopback(scope: Scope) -> bool:
    """Returns whether the connection is to a loopback address of this machine; False for a Unix socket."""
    return _is_loopback((scope.get("server") or ("", 0))[0])


@lru_cache(_MAX_KNOWN_NAMES)
def _is_loopback(address: str) -> bool:
    return is_address(address) and ipaddress.ip_address(address).is_loopback
