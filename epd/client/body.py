"""Builds the bytes of a chat request: a small JSON text around media that are never copied."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MEDIA_MARK = "\x00media\x00"


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
