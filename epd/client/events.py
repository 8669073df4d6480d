"""Cuts the bytes of a streamed answer into events."""

from __future__ import annotations

# Of a request whose answer is read as it comes over the wire: it must not be compressed.
STREAM_HEADERS = {
    "Accept": "text/event-stream",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
}


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
