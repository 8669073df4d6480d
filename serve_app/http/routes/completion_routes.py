"""Answers `/v1/completions`, prompts that are continued as they are, and `/invocations`.

Hosts of containers send whatever a model takes to `/invocations`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from epd.errors import RequestError
from epd.serve_app.http.answers.answer_response import AnswerForm, AnswerResponse
from epd.serve_app.http.answers.completion_answer import Completion, CompletionChunks, CompletionWhole
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.completion_request import CompletionRequest
from epd.serve_app.http.requests.request_parsing import describe
from epd.serve_app.http.routes.chat_answer import chat_answer, wanted_usage
from epd.serve_app.http.routes.completion_parsing import ParsedCompletion, checked_completion
from epd.serve_app.http.routes.prompt_routes import EVENT_STREAM, body_of, server_of
from epd.serve_app.http.server_state import ServerState
from epd.serve_app.observability.record import RequestRecord, record_of
from epd.serve_app.service import AnswerEnd, AnswerItem, TokenDelta
from epd.types import StageTimings, Usage

invocation_routes = APIRouter()
completion_routes = APIRouter()


@completion_routes.post(
    "/v1/completions",
    response_model=Completion,
    responses=EVENT_STREAM,
    openapi_extra=body_of("CompletionRequest"),
)
async def completions(request: Request) -> Response:
    """Continues one or several prompts, at once or as a stream of server-sent events."""
    server = server_of(request)
    wanted, num_bytes = await server.read_json(request, CompletionRequest)
    return completion_answer(
        server, await checked_completion(server, request, wanted, num_bytes), record_of(request)
    )


def completion_answer(server: ServerState, asked: ParsedCompletion, record: RequestRecord) -> AnswerResponse:
    """Returns the response that continues the prompts: a completion or a stream of chunks."""
    chat = asked.parsed.chat
    echoed = [text for text in asked.echoed for _ in range(chat.n or 1)]
    has_logprobs = bool(chat.logprobs)
    includes_usage, counts_on = wanted_usage(chat)
    form = AnswerForm(
        whole=partial(CompletionWhole, record, echoed, has_logprobs=has_logprobs),
        events=partial(
            CompletionChunks,
            record,
            echoed,
            has_logprobs=has_logprobs,
            includes_usage=includes_usage,
            counted_prompt=sum(map(len, asked.prompts)) if counts_on else None,
        ),
    )
    return AnswerResponse(form, _items(server, asked, record), record, server.settings.keep_alive_s)


def _items(
    server: ServerState, asked: ParsedCompletion, record: RequestRecord
) -> AsyncGenerator[Sequence[AnswerItem], None]:
    if not asked.generates:
        return _no_answers(asked, record)
    return server.items_of_prompts(asked.parsed, asked.prompts, record)


async def _no_answers(
    asked: ParsedCompletion, record: RequestRecord
) -> AsyncGenerator[Sequence[AnswerItem], None]:
    """Yields an empty answer for each choice: nothing is asked of a worker."""
    record.end = AnswerEnd(Usage(0, 0, sum(map(len, asked.prompts)), 0), StageTimings())
    yield [TokenDelta(index, "", (), (), "length") for index in range(asked.num_choices)]
    yield [record.end]


@invocation_routes.post("/invocations", responses=EVENT_STREAM, openapi_extra=body_of("ChatRequest"))
async def invocations(request: Request) -> Response:
    """Answers a request with messages as chat completions do, one with a prompt as completions."""
    server, record = server_of(request), record_of(request)
    body = await server.read_body(request)
    wanted = _parsed(body)
    if isinstance(wanted, ChatRequest):
        return chat_answer(server, await server.checked(request, wanted, len(body)), record)
    return completion_answer(server, await checked_completion(server, request, wanted, len(body)), record)


def _parsed(body: bytearray) -> ChatRequest | CompletionRequest:
    """Returns what a body asks for. Raises RequestError."""
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        if not _lacks(error, "messages"):
            raise describe(error) from None
    try:
        return CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        if _lacks(error, "prompt"):
            raise RequestError(
                "received neither messages nor a prompt; allowed: the body of /v1/chat/completions or of "
                "/v1/completions; send one"
            ) from None
        raise describe(error) from None


def _lacks(error: ValidationError, name: str) -> bool:
    """Returns whether a field is not there at all."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    return any(one["type"] == "missing" and one["loc"] == (name,) for one in errors)
