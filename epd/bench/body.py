"""Builds the chat requests of a workload."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from epd.client.body import Body, MediaPart, body_of, media_part, question_content
from epd.workload.requests import PlannedRequest

# The two names of the longest answer: all servers know the first, some of OpenAI's API take the second alone.
OLD_LIMIT, NEW_LIMIT = "max_tokens", "max_completion_tokens"
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


def question_text(seed: int, num_tokens: int) -> str:
    """Returns meaningless words, one a token; another seed differs from the first words on."""
    rng = random.Random(seed)
    return " ".join(rng.choices(_WORDS, k=num_tokens)) + "?"


def chat_body(
    request: PlannedRequest,
    media: Sequence[MediaPart],
    model: str,
    extra: Mapping[str, Any],
    limit_field: str = OLD_LIMIT,
) -> Body:
    """Returns a streaming chat request, greedy unless `extra` says otherwise: media first, then the question.

    limit_field: the name of the answer's length.
    extra: fields of the body that are added to ours or replace them.
    """
    question = question_text(request.text_seed, request.shape.text_tokens)
    content = question_content(list(map(media_part, media)), question)
    record = {
        "model": model,
        "messages": [{"role": "user", "content": content if media else question}],
        limit_field: request.shape.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    return body_of(record, media)
