"""Cuts the bytes of a streamed answer into events."""

from __future__ import annotations


class SSEParser:
    """Parses the data of every complete server-sent event (HTML standard, 9.2), from bytes cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """Returns the data of the events that end within this piece, in order; ignores other fields."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return events
