"""Defines the address that the server listens on."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from epd.errors import RequestError

_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class HttpAddress:
    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def listen(self) -> socket.socket:
        """Opens a listening socket. Raises RequestError if that is impossible at the address."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise RequestError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror}; give another --port"
            ) from error
