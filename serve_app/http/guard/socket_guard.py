"""Limits connections: headers by size and time, bodies and answers by size and rate, and their number.

Uvicorn, which Serve's proxy uses, limits none of these. `install` is called in the proxy's process: Serve
imports it from RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, which must be set when Ray is started.
`epd serve` does that; `BodyReader` applies even if it is not set.

    connected, or answered --first byte--> headers --> body --> answer --client takes none--> stuck
    '- waiting: closed when sockets run out -'                  '---- ended late, or when they run out'
"""

from __future__ import annotations

import logging
import resource
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from epd.serve_app.fair_threads import LoopTurns

C = TypeVar("C", bound=Hashable)


@dataclass(slots=True)
class ConnectionRoom(Generic[C]):
    """Decides which connection is closed for another, where a process has as many as it may.

    waits for a request  -->  the one that has waited longest is closed
    takes no answer      -->  the one that has taken none for longest is ended
    neither              -->  the new one is reserved for a probe of the server's health

    Dictionaries have the oldest first.

    held: connections for any request
    waiting: of these, for a request
    stuck_since_s: when the client of each of these that takes no answer took the last of it
    reserved: connections beyond them, for probes
    """

    held: set[C] = field(default_factory=set)
    waiting: dict[C, None] = field(default_factory=dict)
    stuck_since_s: dict[C, float] = field(default_factory=dict)
    reserved: dict[C, None] = field(default_factory=dict)

    def victim(self, now_s: float, patience_s: float) -> C | None:
        """Returns the connection to close for another. patience_s: for a client that takes no answer."""
        if self.waiting:
            return next(iter(self.waiting))
        stuck, since_s = next(iter(self.stuck_since_s.items()), (None, now_s))
        return stuck if now_s - since_s >= patience_s else None

    def forget(self, connection: C) -> None:
        self.held.discard(connection)
        self.waiting.pop(connection, None)
        self.stuck_since_s.pop(connection, None)
        self.reserved.pop(connection, None)


# Bytes of answers that the system holds unsent for a client that takes nothing, instead of up to 4 MB.
_MAX_UNSENT_BYTES = 128 << 10
# Open files reserved for purposes other than client connections.
_SPARE_FILES = 256
_SILENT = logging.getLogger(f"{__name__}.silent")
_SILENT.disabled = True
_TOO_LARGE = b"431 Request Header Fields Too Large"
_TOO_SLOW = b"408 Request Timeout"
_TOO_MANY = b"503 Service Unavailable\r\nRetry-After: 1"
# The last parts of paths that are answered when no connection is left: ours, and those of Serve's proxy.
_PROBES = frozenset({b"health", b"ping", b"healthz"})


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Limits of one connection, and of all together.

    max_header_bytes: of the request line and the headers, give or take one read from the socket
    header_s: for the headers, from the connection or the first byte after an answer
    max_body_bytes: of one body; slightly above the application's limit, which gives a clear message
    body_s, min_bytes_per_s: a body has `body_s`, plus a second for each `min_bytes_per_s` received
    write_s, min_taken_per_s: to take an answer a client has `write_s`, and a second for each
        `min_taken_per_s` bytes that it takes; then the connection is ended
    stuck_s: after which a client that takes no answer makes room for another, where there is none
    max_connections: at most as many as the process may have open files
    num_reserved: connections beyond these, for probes of the server's health
    max_pipelined: requests that a connection may send before their turn; the rest is not read
    num_pages: answers of open pages that are begun in a turn of the event loop, and made at once; addresses
        take turns, and questions wait for none
    """

    max_header_bytes: int = 64 << 10
    header_s: float = 10.0
    max_body_bytes: int = 129 << 20
    body_s: float = 15.0
    min_bytes_per_s: float = 100_000.0
    write_s: float = 10.0
    min_taken_per_s: float = 10_000.0
    stuck_s: float = 1.0
    max_connections: int = 8192
    num_reserved: int = 16
    max_pipelined: int = 2
    num_pages: int = 2

    @property
    def num_connections(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(16, min(self.max_connections, soft - _SPARE_FILES))


class WriteClock:
    """Gives a client time to take an answer, and more for what it takes.

    patience_s: that it has left, at most what it begins with
    """

    def __init__(self, write_s: float, min_taken_per_s: float) -> None:
        self._write_s = write_s
        self._min_taken_per_s = min_taken_per_s
        self._start_s, self._num_bytes = 0.0, 0
        self.patience_s = write_s

    def start(self, now_s: float, num_bytes: int) -> None:
        """Runs from now on, while the client has `num_bytes` to take."""
        self._start_s, self._num_bytes = now_s, num_bytes

    def end_s(self, num_left: int) -> float:
        """Returns when the client is late, with so many bytes that it has not taken."""
        taken = self._num_bytes - num_left
        return self._start_s + self.patience_s + taken / self._min_taken_per_s

    def stop(self, now_s: float) -> None:
        """Stops, since the client has taken all."""
        self.patience_s = min(self._write_s, self.end_s(0) - now_s)

    def refill(self) -> None:
        self.patience_s = self._write_s


class GuardedProtocol(HttpToolsProtocol):
    """Closes a connection as soon as it is larger or slower than the limits."""

    limits: ClassVar[SocketLimits] = SocketLimits()
    room: ClassVar[ConnectionRoom[GuardedProtocol]] = ConnectionRoom()
    pages: ClassVar[LoopTurns] = LoopTurns(limits.num_pages, limits.num_pages)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_in_headers = False
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._timer: TimerHandle | None = None
        self._clock = WriteClock(self.limits.write_s, self.limits.min_taken_per_s)
        self._write_timer: TimerHandle | None = None
        self._is_last = False  # no request after the one that is read now

    # The connection

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # what the system does not take at once is waited for
        _tune(transport.get_extra_info("socket"))
        self._find_room(self.room, self.loop.time())
        self._expect_within(self.limits.stuck_s if self in self.room.reserved else self.limits.header_s)

    def _find_room(self, room: ConnectionRoom[GuardedProtocol], now_s: float) -> None:
        """Takes a place, that of another connection where there is none, or else one for a probe."""
        limits = self.limits
        if len(room.held) >= limits.num_connections:
            _end_for_another(room.victim(now_s, limits.stuck_s))
        if len(room.held) < limits.num_connections:
            room.held.add(self)
            room.waiting[self] = None
            return
        if len(room.reserved) >= limits.num_reserved:
            _end_for_another(next(iter(room.reserved)))
        room.reserved[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.room.forget(self)
        self._expect_nothing()
        self._stop_write_timer()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over: applications of others behind Serve's proxy may have WebSockets."""
        self.room.forget(self)
        self._expect_nothing()
        super().handle_websocket_upgrade()

    def end_for_another(self) -> None:
        """Closes the connection, without what its client has not taken yet."""
        if self.flow.write_paused:
            self.transport.abort()
        elif self in self.room.reserved:
            self._refuse(_TOO_MANY)
        else:
            self.transport.close()
        self.room.forget(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        now_s = self.loop.time()
        self._clock.start(now_s, self.transport.get_write_buffer_size())
        self._write_timer = self.loop.call_later(self._clock.patience_s, self._check_taken)
        self.room.waiting.pop(self, None)
        if self in self.room.held:
            self.room.stuck_since_s[self] = now_s

    def resume_writing(self) -> None:
        self._clock.stop(self.loop.time())
        self._stop_write_timer()
        self.room.stuck_since_s.pop(self, None)
        super().resume_writing()
        self._wait_if_answered()

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            return
        was_in_headers = self._is_in_headers
        super().data_received(data)
        if was_in_headers and self._is_in_headers:
            self._num_header_bytes += len(data)
            self._check_headers(self._num_header_bytes)

    def send_400_response(self, msg: str) -> None:
        if not self._is_last:
            super().send_400_response(msg)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        if self._is_last:
            self.logger = _SILENT
            raise ConnectionError("no request is read any more")  # which ends the parser
        self._is_in_headers = True
        self._num_header_bytes = self._num_body_bytes = 0
        if self._timer is None:
            self._expect_within(self.limits.header_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self.room.waiting.pop(self, None)
        if self.transport.is_closing():
            return
        if self in self.room.reserved and not _is_probe(self.url):
            self._refuse(_TOO_MANY)
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
        if self in self.room.reserved or len(self.pipeline) >= self.limits.max_pipelined:
            self._is_last, self.cycle.keep_alive = True, False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_if_answered()

    def _wait_if_answered(self) -> None:
        """Waits for another request once all are answered, and the client has taken the answers."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if is_answered and not self.flow.write_paused and not self.transport.is_closing():
            self._clock.refill()
            if self in self.room.held:
                self.room.waiting[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        is_page = cycle.scope["method"] == "GET" and "/v1/" not in cycle.scope["path"]
        is_urgent = not is_page or _is_probe(cycle.scope["raw_path"])
        super()._start_asgi_task(cycle, app if is_urgent else partial(self._answer_in_turn, app))

    async def _answer_in_turn(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        await self.flow.drain()  # a client that takes nothing has no turn
        async with self.pages.turn(self.client and self.client[0]):
            await app(scope, receive, send)

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
            self._refuse(_TOO_MANY if self in self.room.reserved else _TOO_SLOW)

    def _check_taken(self) -> None:
        """Ends the connection if its client has taken too little of what was written to it."""
        now_s = self.loop.time()
        end_s = self._clock.end_s(self.transport.get_write_buffer_size())
        if now_s < end_s:
            self._write_timer = self.loop.call_at(end_s, self._check_taken)
        else:
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, status: bytes) -> None:
        """Closes the connection, with a status unless an answer has begun."""
        cycle = self.cycle
        has_begun = cycle is not None and cycle.response_started and not cycle.response_complete
        if not has_begun and not self.transport.is_closing():
            end = b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            self.transport.write(b"HTTP/1.1 " + status + end)
        self.transport.close()


def _end_for_another(connection: GuardedProtocol | None) -> None:
    if connection is not None:
        connection.end_for_another()


def _tune(sock: socket.socket) -> None:
    """Has the system send small writes at once, and take no more than is likely to be sent soon.

    Otherwise a write waits up to 40 ms for the one before to be acknowledged: asyncio sees to that only where
    the listening socket was made with the number of the protocol. And pages for clients that read nothing
    would be made until buffers are full. What is on its way to a client has no such limit.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)


def _is_probe(url: bytes) -> bool:
    return url.partition(b"?")[0].rpartition(b"/")[2] in _PROBES


def install() -> list[Any]:
    """Makes uvicorn use guarded connections in this process. Returns no middlewares, as a list for Serve."""
    HTTP_PROTOCOLS["auto"] = "epd.serve_app.http.guard.socket_guard:GuardedProtocol"
    return []
