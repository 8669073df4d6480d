"""Builds the bytes of a chat request: a small JSON text around media that are never copied."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd.workload.requests import PlannedRequest

# About one token each in the vocabularies of Qwen, Llama and shapes-vl, with the space before them.
_WORDS = (
    *(
        "the",
        "of",
        "in",
        "on",
        "is",
        "are",
        "there",
        "you",
        "can",
        "see",
        "me",
        "what",
        "which",
        "how",
        "many",
    ),
    *("does", "have", "first", "last", "next", "after", "video", "screen", "seconds", "colour", "something"),
    *("nothing", "different", "visible", "circle", "square", "triangle", "star", "cross", "ring", "red"),
    *("orange", "yellow", "green", "cyan", "blue", "purple", "white"),
)
_MEDIA_MARK = "\x00media\x00"


@dataclass(frozen=True, slots=True)
class MediaPart:
    """Holds one encoded medium of a request. base64: its bytes, ready for a data: URL."""

    mime: str
    base64: bytes

    @property
    def kind(self) -> str:
        """Returns the type of the content part: image_url or video_url."""
        return f"{self.mime.split('/')[0]}_url"


@dataclass(frozen=True, slots=True)
class Body:
    """Holds a request's body in pieces, in order."""

    pieces: tuple[bytes, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.pieces))


def question_text(seed: int, num_tokens: int) -> str:
    """Returns meaningless words, one a token; another seed differs from the first words on."""
    rng = random.Random(seed)
    return " ".join(rng.choices(_WORDS, k=num_tokens)) + "?"


def chat_body(
    request: PlannedRequest, media: Sequence[MediaPart], model: str, extra: Mapping[str, Any]
) -> Body:
    """Returns a streaming chat request, greedy unless `extra` says otherwise: media first, then the question.

    extra: fields of the body that are added to ours or replace them.
    """
    content: list[dict[str, Any]] = [{"type": part.kind, part.kind: {"url": _MEDIA_MARK}} for part in media]
    content.append({"type": "text", "text": question_text(request.text_seed, request.shape.text_tokens)})
    record = {
        "model": model,
        "messages": [{"role": "user", "content": content if media else content[0]["text"]}],
        "max_tokens": request.shape.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    mark = json.dumps(_MEDIA_MARK)[1:-1].encode()
    first, *others = json.dumps(record).encode().split(mark)
    pieces = [first]
    for part, text in zip(media, others, strict=True):
        pieces += [f"data:{part.mime};base64,".encode(), part.base64, text]
    return Body(tuple(pieces))
