"""Ports for servers that tests start as programs."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NUM_PROCESSES = 16
_given: set[int] = set()


@contextmanager
def kept_port() -> Iterator[int]:
    """Yields a port that the system gives to nobody while a process starts that will listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def free_port() -> int:
    """Returns a port that the system gives to nobody by itself: it is free for longer than a moment.

    No other process of the same tests gets it, nor a later call.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        port = random.randrange(first // 2, first) // _NUM_PROCESSES * _NUM_PROCESSES + _place()
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in _given:
                _given.add(port)
                return port


def _place() -> int:
    """Returns the number of this process among those of `pytest -n`; 0 for one beside them."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw-1").removeprefix("gw"))
    return (number + 1) % _NUM_PROCESSES
