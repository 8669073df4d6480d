"""Links two processes: messages in order over TCP, authenticated by a key that both have.

    server:  nonce                                       client:  nonce, proof of the key
    server:  proof of the key                            then messages, either way

    message:  size of the rest, number of buffers, size of the pickle, sizes of buffers | pickle | buffers

Arrays travel beside the pickle and are read into memory of their own: a received array is writable, and no
part of it is copied after it has left the socket. Nothing is unpickled before the key is proven. A link to a
machine that has vanished ends by itself, `SILENT_S` after anything was last heard of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import pickle
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from epd.errors import UnavailableError
from epd.serve_app.network.pickling import dumps

logger = logging.getLogger(__name__)

_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_PREFIX = struct.Struct(">QII")  # bytes of the body, buffers in it, bytes of the pickle
_ALIGNMENT = 16  # of buffers within a body
_READ_BYTES = 1 << 16
# Of one message. Frames of a group are some tens of MB; a larger claim is an error of the peer.
MAX_MESSAGE_BYTES = 1 << 30
_HANDSHAKE_S = 5.0
# After this time without a sign of the other machine's kernel a link ends. A process that is only busy, or
# stopped, is not silent in that sense unless it leaves bytes unread for as long.
SILENT_S = 30
_PROBE_AFTER_S = 10  # without any byte; again after each
_PROBE_EVERY_S = 5
_MAX_STRANGERS = 64  # connections to one listener that have not proven the key


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address that other members reach a process at."""

    host: str
    port: int


class LinkClosedError(UnavailableError):
    """Raised for calls over a link that has ended: whether they were handled is unknown."""


class LinkTimeoutError(LinkClosedError):
    """Raised when a link is not open in time: one of the two processes may only be slow."""


class _RefusedError(Exception):
    """Raised for a peer that has not proven the key."""


class _Handshake:
    """Proves the key to the other end, and lets it prove that it has the key. Picture: see above."""

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        self._key = key
        self._is_server = is_server
        self._nonce = secrets.token_bytes(_NONCE_BYTES) if is_server else b""
        self.is_over = False

    @property
    def greeting(self) -> bytes:
        """Returns what is sent first: the server's nonce, nothing by a client."""
        return self._nonce

    def take(self, data: memoryview) -> tuple[int, bytes]:
        """Returns the bytes taken, 0 if more must come first, and those to send. Raises _RefusedError."""
        if self._is_server:
            return self._check_client(data)
        return self._check_server(data) if self._nonce else self._answer(data)

    def _check_client(self, data: memoryview) -> tuple[int, bytes]:
        size = _NONCE_BYTES + _PROOF_BYTES
        if len(data) < size:
            return 0, b""
        nonces = self._nonce + bytes(data[:_NONCE_BYTES])
        self._check(data[_NONCE_BYTES:size], b"client", nonces)
        return size, self._proof(b"server", nonces)

    def _answer(self, data: memoryview) -> tuple[int, bytes]:
        """Takes the server's nonce."""
        if len(data) < _NONCE_BYTES:
            return 0, b""
        mine = secrets.token_bytes(_NONCE_BYTES)
        self._nonce = bytes(data[:_NONCE_BYTES]) + mine
        return _NONCE_BYTES, mine + self._proof(b"client", self._nonce)

    def _check_server(self, data: memoryview) -> tuple[int, bytes]:
        if len(data) < _PROOF_BYTES:
            return 0, b""
        self._check(data[:_PROOF_BYTES], b"server", self._nonce)
        return _PROOF_BYTES, b""

    def _check(self, proof: memoryview, side: bytes, nonces: bytes) -> None:
        if not hmac.compare_digest(bytes(proof), self._proof(side, nonces)):
            raise _RefusedError(f"a {side.decode()} without the key")
        self.is_over = True

    def _proof(self, side: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self._key, side + nonces, "sha256")


class Link(asyncio.BufferedProtocol):
    """One end of a link. Used from one event loop.

    on_message: called with each message, in order
    on_close: called once, with the reason, when an open link ends
    """

    def __init__(
        self,
        key: bytes,
        *,
        is_server: bool,
        on_open: Callable[[], None],
        on_refused: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Starts before the handshake. on_refused: called with the reason if that fails."""
        self.on_message: Callable[[Any], None] = lambda _message: None
        self.on_close: Callable[[str], None] = lambda _reason: None
        self.is_open = False
        self._handshake = _Handshake(key, is_server=is_server)
        self._on_open = on_open
        self._on_refused = on_refused
        self._transport: asyncio.Transport | None = None
        self._reason = ""
        # Small messages are read several at a time into one buffer, a large one into memory of its own.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._num_read = 0
        self._prefix: tuple[int, int, int] | None = None
        self._body: memoryview | None = None
        self._num_in_body = 0

    # Sending

    def send(self, message: Any) -> None:
        """Sends a message without waiting. Does nothing once the link has ended, or was closed here."""
        if self._transport is None or not self.is_open or self._transport.is_closing():
            return
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(message, buffers.append)
        views = [buffer.raw() for buffer in buffers]
        sizes = struct.pack(f">{len(views)}Q", *(view.nbytes for view in views))
        parts: list[bytes | memoryview] = [sizes, pickled]
        num_bytes = len(sizes) + len(pickled)
        for view in views:
            padding = -num_bytes % _ALIGNMENT
            parts += [bytes(padding), view]
            num_bytes += padding + view.nbytes
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {num_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
        self._transport.writelines([_PREFIX.pack(num_bytes, len(views), len(pickled)), *parts])

    def close(self, reason: str = "closed here") -> None:
        """Ends the link, and sends what was given to `send` before."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.close()

    # The protocol of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's, in replicas, does not inherit from it
        if self._reason:  # closed before
            self._transport.abort()
            return
        _set_options(transport.get_extra_info("socket"))
        self._transport.write(self._handshake.greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        was_open, self.is_open = self.is_open, False
        reason = self._reason or (str(exc) if exc else "its process has ended")
        if was_open:
            self.on_close(reason)
        else:
            self._on_refused(reason)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's
        if self._body is not None:
            return self._body[self._num_in_body :]
        return self._buffer[self._num_read :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._body is not None:
                self._num_in_body += nbytes
                if self._num_in_body == len(self._body):
                    self._take_body()
            else:
                self._num_read += nbytes
                self._read_buffered()
        except Exception as error:
            logger.exception("a link ends")
            self._fail(f"{type(error).__name__} while reading")

    def _fail(self, reason: str) -> None:
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    # Receiving

    def _read_buffered(self) -> None:
        start = 0
        while self._body is None:
            taken = self._read_one(self._buffer[start : self._num_read])
            if not taken:
                break
            start += taken
        left = 0 if self._body is not None else self._num_read - start
        if left and start:
            self._buffer[:left] = bytes(self._buffer[start : self._num_read])
        self._num_read = left

    def _read_one(self, data: memoryview) -> int:
        """Reads one piece of what has come. Returns the bytes taken; 0 if more must come first."""
        if not self.is_open:
            return self._shake_hands(data)
        if len(data) < _PREFIX.size:
            return 0
        num_bytes, num_buffers, num_pickled = _PREFIX.unpack_from(data)
        if num_bytes > MAX_MESSAGE_BYTES or 8 * num_buffers + num_pickled > num_bytes:
            self._fail(f"a message of {num_bytes} bytes was announced")
            return 0
        self._prefix = num_bytes, num_buffers, num_pickled
        body = data[_PREFIX.size : _PREFIX.size + num_bytes]
        if len(body) == num_bytes and not num_buffers:
            self._pass_on(pickle.loads(body))
            return _PREFIX.size + len(body)
        if not num_buffers and _PREFIX.size + num_bytes <= len(self._buffer):
            return 0
        self._body = np.empty(num_bytes, np.uint8).data
        self._body[: len(body)] = body
        self._num_in_body = len(body)
        if len(body) == num_bytes:
            self._take_body()
        return _PREFIX.size + len(body)

    def _shake_hands(self, data: memoryview) -> int:
        assert self._transport is not None
        try:
            num_taken, reply = self._handshake.take(data)
        except _RefusedError as error:
            self._fail(str(error))
            return 0
        self._transport.write(reply)
        if self._handshake.is_over:
            self.is_open = True
            self._on_open()
        return num_taken

    def _take_body(self) -> None:
        """Passes on a message that has been read into memory of its own."""
        assert self._prefix is not None
        assert self._body is not None
        (_, num_buffers, num_pickled), body = self._prefix, self._body
        self._body, self._prefix = None, None
        sizes = struct.unpack_from(f">{num_buffers}Q", body)
        stop = 8 * num_buffers + num_pickled
        pickled, buffers = body[8 * num_buffers : stop], list[memoryview]()
        for size in sizes:
            start = stop + -stop % _ALIGNMENT
            stop = start + size
            buffers.append(body[start:stop])
        self._pass_on(pickle.loads(pickled, buffers=buffers))

    def _pass_on(self, message: Any) -> None:
        try:
            self.on_message(message)
        except Exception:  # a bug in a handler; the next message is about something else
            logger.exception("a message was not handled: %s", type(message).__name__)


def _set_options(connection: socket.socket) -> None:
    """Sends small messages at once, and asks an idle peer for signs of life."""
    with suppress(OSError):  # it has ended
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        num_probes = (SILENT_S - _PROBE_AFTER_S) // _PROBE_EVERY_S
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, num_probes)
        # Bytes that are sent and not acknowledged: without it, for about a quarter of an hour.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)


async def connect(address: Address, key: bytes) -> Link:
    """Connects to a listener.

    Raises LinkClosedError if none answers there that has the key, LinkTimeoutError if that is not known yet.
    """
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not opened.done():
            opened.set_result(None) if error is None else opened.set_exception(error)

    link = Link(
        key,
        is_server=False,
        on_open=lambda: settle(None),
        on_refused=lambda reason: settle(ConnectionError(reason)),
    )
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await loop.create_connection(lambda: link, address.host, address.port)
            await opened
    except asyncio.CancelledError:
        link.close()
        raise
    except TimeoutError as error:
        link.close()
        text = f"no member has answered at {address.host}:{address.port} within {_HANDSHAKE_S:g} s"
        raise LinkTimeoutError(text) from error
    except OSError as error:
        link.close()
        raise LinkClosedError(f"no member answers at {address.host}:{address.port}: {error}") from error
    return link


class Listener:
    """Accepts links at an address of this machine. Created by `listen`."""

    def __init__(self, key: bytes, on_link: Callable[[Link], None]) -> None:
        self._key = key
        self._on_link = on_link
        self._server: asyncio.Server | None = None
        self._strangers: dict[Link, None] = {}  # both in the order in which they came
        self._links: dict[Link, None] = {}
        self._is_closed = False
        self.address = Address("", 0)

    async def start(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._new_link, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = Address(host, port)

    def _new_link(self) -> Link:
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close("too many others have not proven the key")
        link = Link(self._key, is_server=True, on_open=lambda: self._accept(link))
        if self._is_closed:  # it was accepted just before
            link.close()
        self._strangers[link] = None
        asyncio.get_running_loop().call_later(_HANDSHAKE_S, self._forget_stranger, link)
        return link

    def _forget_stranger(self, link: Link) -> None:
        if link in self._strangers:
            del self._strangers[link]
            link.close("it has not proven the key")

    def _accept(self, link: Link) -> None:
        self._strangers.pop(link, None)
        self._links = {**dict.fromkeys(self.links), link: None}  # without those that have ended
        self._on_link(link)

    @property
    def links(self) -> Sequence[Link]:
        """Returns the links that are open."""
        self._links = {link: None for link in self._links if link.is_open}
        return tuple(self._links)

    async def close(self) -> None:
        """Ends the listener and its links."""
        self._is_closed = True
        if self._server is not None:
            # A server that is closed while a connection is being accepted leaves that open.
            for listening in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            self._server.close()
        for link in (*self._links, *self._strangers):
            link.close()


async def listen(host: str, key: bytes, on_link: Callable[[Link], None]) -> Listener:
    """Listens at a free port of an address of this machine. on_link: gets each link that has the key."""
    listener = Listener(key, on_link)
    await listener.start(host)
    return listener
