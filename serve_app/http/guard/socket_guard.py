"""Limits connections to the HTTP proxy: headers by size and time, bodies by size and rate, and their number.

Uvicorn, which Serve's proxy uses, limits none of these. `install` is called in the proxy's process: Serve
imports it from RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, which must be set when Ray is started.
`epd serve` does that; `BodyReader` applies even if it is not set.

    connected, or answered --first byte--> headers --> body --> answer
    '---- waiting: closed when sockets run out ----'
"""

from __future__ import annotations

import resource
from asyncio import TimerHandle, Transport
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Open files reserved for purposes other than client connections.
_SPARE_FILES = 256
_TOO_LARGE = b"431 Request Header Fields Too Large"
_TOO_SLOW = b"408 Request Timeout"
_TOO_MANY = b"503 Service Unavailable\r\nRetry-After: 1"


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Limits of one connection, and of all together.

    max_header_bytes: of the request line and the headers, give or take one read from the socket
    header_s: for the headers, from the connection or the first byte after an answer
    max_body_bytes: of one body; slightly above the application's limit, which gives a clear message
    body_s, min_bytes_per_s: a body has `body_s`, plus a second for each `min_bytes_per_s` received
    max_connections: at most as many as the process may have open files
    """

    max_header_bytes: int = 64 << 10
    header_s: float = 10.0
    max_body_bytes: int = 129 << 20
    body_s: float = 15.0
    min_bytes_per_s: float = 100_000.0
    max_connections: int = 8192

    @property
    def num_connections(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(16, min(self.max_connections, soft - _SPARE_FILES))


class GuardedProtocol(HttpToolsProtocol):
    """Closes a connection as soon as it is larger or slower than the limits."""

    limits: ClassVar[SocketLimits] = SocketLimits()
    _waiting: ClassVar[dict[GuardedProtocol, None]] = {}  # for a request; the oldest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._timer: TimerHandle | None = None

    # The connection

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        is_full = len(self.connections) >= self.limits.num_connections
        super().connection_made(transport)
        if is_full and not self._waiting:
            self._refuse(_TOO_MANY)
            return
        if is_full:
            next(iter(self._waiting)).transport.close()
        self._waiting[self] = None
        self._expect_within(self.limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_headers = self._is_in_headers
        super().data_received(data)
        if was_in_headers and self._is_in_headers:
            self._num_header_bytes += len(data)
            self._check_headers(self._num_header_bytes)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._is_in_headers = True
        self._num_header_bytes = self._num_body_bytes = 0
        if self._timer is None:
            self._expect_within(self.limits.header_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._waiting.pop(self, None)
        if self.transport.is_closing():
            return
        if self._check_headers(len(self.url) + sum(len(name) + len(value) for name, value in self.headers)):
            self._expect_within(self.limits.body_s)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self.limits.max_body_bytes:
            self.transport.close()
        elif not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._expect_nothing()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self._waiting[self] = None

    # The limits

    def _check_headers(self, num_bytes: int) -> bool:
        if num_bytes > self.limits.max_header_bytes:
            self._refuse(_TOO_LARGE)
            return False
        return True

    def _expect_within(self, seconds: float) -> None:
        self._expect_nothing()
        start_s = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._check_rate, start_s, seconds)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_rate(self, start_s: float, grace_s: float) -> None:
        """Refuses a late request, unless more of its body has arrived or the client is not to blame."""
        now_s = self.loop.time()
        end_s = start_s + grace_s + self._num_body_bytes / self.limits.min_bytes_per_s
        if self.flow.read_paused:
            end_s = now_s + grace_s
        if now_s < end_s:
            self._timer = self.loop.call_at(end_s, self._check_rate, start_s, grace_s)
        else:
            self._timer = None
            self._refuse(_TOO_SLOW)

    def _refuse(self, status: bytes) -> None:
        """Closes the connection, with a status unless an answer has begun."""
        cycle = self.cycle
        has_begun = cycle is not None and cycle.response_started and not cycle.response_complete
        if not has_begun and not self.transport.is_closing():
            end = b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            self.transport.write(b"HTTP/1.1 " + status + end)
        self.transport.close()


def install() -> list[Any]:
    """Makes uvicorn use guarded connections in this process. Returns no middlewares, as a list for Serve."""
    HTTP_PROTOCOLS["auto"] = "epd.serve_app.http.guard.socket_guard:GuardedProtocol"
    return []
