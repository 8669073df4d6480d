"""Computes what a chat request asks for, from its JSON, before any work is done for it."""

from __future__ import annotations

from collections.abc import Sequence

from epd.chat import ChatMessage
from epd.control.request_budget import RequestBudget
from epd.data_uri import num_listed_frames
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.service import MediaReference


def budget_of(
    chat: ChatRequest,
    messages: Sequence[ChatMessage],
    references: Sequence[MediaReference],
    *,
    num_bytes: int = 0,
    context_tokens: int | None = None,
) -> RequestBudget:
    """Returns the amounts of a request.

    messages, references: its conversation
    num_bytes: of its body
    context_tokens: of the model, the limit of any answer
    """
    stops = [chat.stop] if isinstance(chat.stop, str) else chat.stop or []
    return RequestBudget(
        num_messages=len(messages),
        num_parts=sum(len(message.parts) + len(message.tool_calls) for message in messages),
        num_media=len(references),
        num_json_bytes=max(0, num_bytes - sum(len(one.url) for one in references)),
        num_text_bytes=sum(map(_num_bytes, messages)),
        num_frames=sum(_num_frames(chat, one.url) for one in references if one.kind == "video"),
        num_answer_tokens=_num_answer_tokens(chat, context_tokens),
        num_stop_strings=len(stops),
        num_stop_chars=sum(map(len, stops)),
        num_stop_token_ids=len(chat.stop_token_ids or ()),
    )


def _num_bytes(message: ChatMessage) -> int:
    called = [text for call in message.tool_calls for text in (call.name, call.arguments, call.call_id)]
    texts = (*(part.text for part in message.parts), *called, message.tool_call_id, message.name)
    return sum(len(text.encode()) for text in texts)


def _num_frames(chat: ChatRequest, url: str) -> int:
    """Returns the number of frames requested of a video, of a list those sent; 0 if not given."""
    asked = max((options.num_frames or 0 for options in chat.frame_options()), default=0)
    return num_listed_frames(url) or asked


def _num_answer_tokens(chat: ChatRequest, context_tokens: int | None) -> int:
    asked = chat.max_completion_tokens or chat.max_tokens or 0
    return (asked if context_tokens is None else min(asked, context_tokens)) * (chat.n or 1)
