"""Carries messages between a process and its media children: a JSON header, then raw bytes; no pickles.

    | 4 bytes: length | header, JSON | 8 bytes: length | payload |

The parent trusts nothing that a child sends: lengths are bounded here, the readers check the headers.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

MAX_HEADER_BYTES = 64 << 20  # of a request; the times of a video's frames are in it
MAX_REPLY_HEADER_BYTES = 1 << 20
_HEADER = struct.Struct("<I")
_PAYLOAD = struct.Struct("<Q")

Header = Mapping[str, Any]


class ChildGoneError(Exception):
    """Says that the other side closed its socket, sent nonsense, or did not answer in time."""


def send(
    sock: socket.socket,
    header: Header,
    payload: bytes | memoryview = b"",
    descriptor: int | None = None,
) -> None:
    """Sends a message. payload: of bytes. descriptor: of a file, passed along. Raises ChildGoneError."""
    text = json.dumps(header).encode()
    size = len(payload)
    try:
        head = _HEADER.pack(len(text))
        if descriptor is None:
            sock.sendall(head)
        else:
            socket.send_fds(sock, [head], [descriptor])
        sock.sendall(text + _PAYLOAD.pack(size))
        if size:
            sock.sendall(payload)
    except OSError as error:
        raise ChildGoneError(str(error)) from error


def receive(
    sock: socket.socket, max_header_bytes: int, max_payload_bytes: int, end_s: float | None = None
) -> tuple[Header, bytearray, int | None]:
    """Returns (header, payload, descriptor of a file that came along).

    end_s: on the monotonic clock, by which all of it must be there. Raises ChildGoneError.
    """
    try:
        _set_timeout(sock, end_s)
        head, descriptors, _, _ = socket.recv_fds(sock, _HEADER.size, 1)
        descriptor = descriptors[0] if descriptors else None
        head += bytes(_filled(sock, _HEADER.size - len(head), end_s))
        (length,) = _HEADER.unpack(head)
        header = json.loads(_filled(sock, _bounded(length, max_header_bytes), end_s))
        (size,) = _PAYLOAD.unpack(_filled(sock, _PAYLOAD.size, end_s))
        payload = _filled(sock, _bounded(size, max_payload_bytes), end_s)
    except (OSError, ValueError, RecursionError) as error:
        raise ChildGoneError(f"{type(error).__name__}: {error}") from error
    if not isinstance(header, dict):
        raise ChildGoneError("a header that is not an object")
    return header, payload, descriptor


def _bounded(length: int, allowed: int) -> int:
    if length > allowed:
        raise ChildGoneError(f"a message of {length} bytes; allowed {allowed}")
    return length


def _set_timeout(sock: socket.socket, end_s: float | None) -> None:
    sock.settimeout(None if end_s is None else max(0.001, end_s - time.monotonic()))


def _filled(sock: socket.socket, num_bytes: int, end_s: float | None) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        _set_timeout(sock, end_s)
        num_read = sock.recv_into(view)
        if not num_read:
            raise ChildGoneError("closed")
        view = view[num_read:]
    return data
