"""Builds the bytes of a chat request: a small JSON text around media that are never copied.

Cuts the bytes of a streamed answer into events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MEDIA_MARK = "\x00media\x00"
# Of a request whose answer is read as it comes over the wire: it must not be compressed.
STREAM_HEADERS = {
    "Accept": "text/event-stream",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
}


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Holds one encoded medium of a request. base64: its bytes, ready for a data: URL."""

    mime: str
    base64: bytes

    @property
    def kind(self) -> str:
        """Returns the type of the content part: image_url, video_url or audio_url."""
        return f"{self.mime.split('/')[0]}_url"


@dataclass(frozen=True, slots=True)
class Body:
    """Holds a request's body in pieces, in order."""

    pieces: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))


def media_part(part: MediaPart) -> dict[str, Any]:
    """Returns the content part of a medium whose bytes `body_of` puts in."""
    return {"type": part.kind, part.kind: {"url": _MEDIA_MARK}}


def question_content(media: Sequence[dict[str, Any]], question: str) -> list[dict[str, Any]]:
    """Returns the content of a message: media first, so that questions about the same share what is cached.

    media: content parts
    """
    return [*media, {"type": "text", "text": question}]


def body_of(record: Mapping[str, Any], media: Sequence[MediaPart]) -> Body:
    """Returns a request with the media in the places of their parts.

    record: the request, with a `media_part` for each of the media, in order
    """
    mark = json.dumps(_MEDIA_MARK)[1:-1].encode()
    first, *others = json.dumps(record).encode().split(mark)
    pieces = [first]
    for part, text in zip(media, others, strict=True):
        pieces += [f"data:{part.mime};base64,".encode(), part.base64, text]
    return Body(tuple(pieces))


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
