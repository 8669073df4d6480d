"""Makes conversations about media, and prompts of what all questions about them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle

from epd.chat import ChatMessage, ContentPart, Role, one_turn, text_message
from epd.encoders import Adapter, MediaPlan, PromptPlan
from epd.errors import check_question
from epd.types import MediaKind

_ANY_QUESTION = "?"


def plan_prefix(
    adapter: Adapter, media: Sequence[MediaPlan], messages: Sequence[ChatMessage] = ()
) -> PromptPlan:
    """Lays out the common beginning of all questions about the media: up to the last visual token.

    messages: a conversation that begins like all of them; by default the media begin.
    """
    whole = adapter.plan_chat(media, opening([plan.kind for plan in media], messages))
    stop = whole.prefix_length
    marks = None if whole.both_ways is None else whole.both_ways[:stop]
    return replace(
        whole, token_ids=whole.token_ids[:stop], positions=whole.positions[:, :stop], both_ways=marks
    )


def dialogue(
    kinds: Sequence[MediaKind], question: str, earlier: Sequence[tuple[str, str]] = ()
) -> tuple[ChatMessage, ...]:
    """Creates the conversation of media, questions with their answers, and one more question.

    Raises RequestError if a text is empty.
    """
    first, *others = texts = [*chain.from_iterable(earlier), question]
    for text in texts:
        check_question(text)
    roles: Iterator[Role] = cycle(("assistant", "user"))
    return (*one_turn(kinds, first), *map(text_message, roles, others))


def opening(kinds: Sequence[MediaKind], messages: Sequence[ChatMessage] = ()) -> tuple[ChatMessage, ...]:
    """Creates the conversation that has any question behind the last medium of `messages`.

    Without messages, or without media in them, it has one turn with media of these kinds.
    """
    with_media = [place for place, message in enumerate(messages) if message.media_kinds]
    if not with_media:
        return one_turn(kinds, _ANY_QUESTION)
    last = messages[with_media[-1]]
    stop = 1 + max(place for place, part in enumerate(last.parts) if part.kind != "text")
    parts = (*last.parts[:stop], ContentPart("text", _ANY_QUESTION))
    return (*messages[: with_media[-1]], replace(last, parts=parts))
