"""Gives the answer to a chat request the form of chat completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from epd.serve_app.http.answers.answer_response import AnswerForm, AnswerResponse
from epd.serve_app.http.answers.responses import ChunkBuilder, CompletionBuilder
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.server_state import ParsedRequest, ServerState
from epd.serve_app.observability.record import RequestRecord


def wanted_usage(chat: ChatRequest) -> tuple[bool, bool]:
    """Returns whether a stream ends with its usage, and whether each event has the usage so far."""
    options = chat.stream_options
    is_wanted = bool(options and options.include_usage)
    return is_wanted, is_wanted and bool(options and options.continuous_usage_stats)


def chat_answer(server: ServerState, parsed: ParsedRequest, record: RequestRecord) -> AnswerResponse:
    """Returns the response that answers: a completion or a stream of chunks."""
    chat = parsed.chat
    options: dict[str, Any] = {"has_logprobs": bool(chat.logprobs), "parsing": server.parsing_of(parsed)}
    includes_usage, counts_on = wanted_usage(chat)
    form = AnswerForm(
        whole=partial(CompletionBuilder, record, chat.n or 1, **options),
        events=partial(
            ChunkBuilder,
            record,
            chat.n or 1,
            includes_usage=includes_usage,
            counts_on=counts_on,
            **options,
        ),
    )
    return AnswerResponse(form, server.items(parsed, record), record, server.settings.keep_alive_s)
