"""Server-sent events, as far as the OpenAI API uses them: the data of each event, from bytes cut anywhere.

Source: the HTML standard, section 9.2 (event streams).
"""

from __future__ import annotations


class SSEParser:
    """Takes a stream's bytes in pieces and gives the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """Returns the data of the events that end within this piece, in order; other fields are passed
        over.
        """
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
