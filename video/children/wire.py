"""Carries messages between a process and its media children: a JSON header, then raw bytes; no pickles.

    | 4 bytes: length | header, JSON | 8 bytes: length | payload |

The parent trusts nothing that a child sends: lengths are bounded here, the readers check the headers.

Frames lie in memory that both share. One block serves group after group: fresh pages of shared memory cost
forty times what copying them does. The parent makes it and seals its size, so that a child cannot shrink what
the parent has mapped.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epd.types import UInt8Array

# To the server that forks: F and a job's socket, K and a pid. From it: R and names of walls, then pids.
FORK, KILL, READY = b"F", b"K", b"R"
PID = struct.Struct("<i")
MAX_HEADER_BYTES = 64 << 20  # of a request; the times of a video's frames are in it
MAX_REPLY_HEADER_BYTES = 1 << 20
_HEADER = struct.Struct("<I")
_PAYLOAD = struct.Struct("<Q")
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 2, 4

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


class SharedPixels:
    """The parent's end of a block of shared memory. descriptor: is sent to the child."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(1, num_bytes)
        self.descriptor = os.memfd_create("epd-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.num_bytes)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._pixels = mapped(self.descriptor)
        except BaseException:
            os.close(self.descriptor)
            raise

    def copy(self, shape: Sequence[int]) -> UInt8Array:
        """Returns the first pixels as an array of their own, uint8 of the given shape."""
        return self._pixels[: math.prod(shape)].reshape(shape).copy()

    def close(self) -> None:
        os.close(self.descriptor)


def mapped(descriptor: int) -> UInt8Array:
    """Returns all of a block, uint8 [bytes], to be read and written."""
    size = os.fstat(descriptor).st_size
    return np.frombuffer(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
