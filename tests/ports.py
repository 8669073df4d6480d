"""Ports for servers that tests start as programs."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def kept_port() -> Iterator[int]:
    """Yields a port that the system gives to nobody while a process starts that will listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def free_port() -> int:
    """Returns a port that the system gives to nobody by itself: it is free for longer than a moment."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(first // 2, first))) as free,
        ):
            port: int = free.getsockname()[1]
            return port
