"""Answers chats, `/v1/completions`, `/v1/responses` and `/invocations`.

A completion continues prompts as they are, which become tokens before anything is planned for it. A response
is a chat's answer in the form of OpenAI's responses. Hosts of containers send whatever a model takes to
`/invocations`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from epd.control.request_budget import RequestBudget
from epd.errors import RequestError
from epd.serve_app.http.answers.answer_response import AnswerResponse
from epd.serve_app.http.answers.completion_answer import Completion, CompletionChunks, CompletionWhole
from epd.serve_app.http.answers.response_answer import ResponseBuilder, ResponseReply
from epd.serve_app.http.answers.responses import ChunkBuilder, CompletionBuilder
from epd.serve_app.http.guard.http_guard import client_of
from epd.serve_app.http.protocol import ChatCompletion
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.completion_request import COMPLETION_FIELDS, CompletionRequest
from epd.serve_app.http.requests.request_parsing import describe, stop_amounts
from epd.serve_app.http.requests.response_request import ResponseRequest, chat_of
from epd.serve_app.http.routes.prompt_routes import EVENT_STREAM, body_of
from epd.serve_app.http.server_state import ParsedRequest, ServerState, server_of
from epd.serve_app.observability.record import RequestRecord, record_of
from epd.serve_app.service import AnswerEnd, AnswerItem, ModelCard, PromptService, TokenDelta
from epd.types import StageTimings, Usage


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
    num, streams = chat.n or 1, {**options, "includes_usage": includes_usage, "counts_on": counts_on}
    return AnswerResponse(
        partial(CompletionBuilder, record, num, **options),
        partial(ChunkBuilder, record, num, **streams),
        server.items(parsed, record),
        record,
        server.settings.keep_alive_s,
    )


answer_routes = APIRouter()


@answer_routes.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    openapi_extra=body_of("ChatRequest"),
)
async def chat_completions(request: Request) -> Response:
    """Answers a conversation about images and videos, at once or as a stream of server-sent events."""
    server = server_of(request)
    return chat_answer(server, await server.read(request), record_of(request))


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A checked completion request.

    parsed: its options
    prompts: the tokens of each prompt
    echoed: the text that stands before the answers to each prompt, empty without `echo`
    generates: whether there is anything to generate
    """

    parsed: ParsedRequest
    prompts: tuple[tuple[int, ...], ...]
    echoed: tuple[str, ...]
    generates: bool = True

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * (self.parsed.chat.n or 1)


async def checked_completion(
    server: ServerState, request: Request, wanted: CompletionRequest, num_bytes: int
) -> ParsedCompletion:
    """Checks a completion request that was read. num_bytes: of its body. Raises EPDError."""
    _check_supported(wanted)
    options = wanted.options()
    model = server.check_options(request, options)
    received = wanted.prompts()
    _budget_of(options, received, num_bytes, model).check(server.settings.limits)
    asked = ParsedRequest(options, (), (), client=client_of(request))
    parsed = await server.accepted(asked, record_of(request), model)
    prompts, echoed = [], []
    for number, prompt in enumerate(received):
        place = f"prompt[{number}]" if len(received) > 1 else "prompt"
        token_ids, text = await _tokens_and_text(server.service.prompts, prompt, wanted, place)
        _check_length(token_ids, model, place)
        prompts.append(token_ids)
        echoed.append(text if wanted.echo else "")
    return ParsedCompletion(parsed, tuple(prompts), tuple(echoed), wanted.max_tokens != 0)


def _check_supported(wanted: CompletionRequest) -> None:
    COMPLETION_FIELDS.check(wanted.model_extra or {}, CompletionRequest.model_fields)
    if wanted.max_tokens == 0 and not wanted.echo:
        raise RequestError("received max_tokens 0; allowed: at least 1, or 0 with echo; raise it or set echo")
    if wanted.echo and wanted.logprobs is not None:
        raise RequestError(
            "received echo with logprobs; allowed: one of the two, as prompts have no logprobs here; "
            "leave one out"
        )


def _budget_of(
    options: ChatRequest, received: Sequence[str | list[int]], num_bytes: int, model: ModelCard
) -> RequestBudget:
    """Returns the amounts of a request. A text costs its bytes, which are at least its tokens."""
    num_answers = len(received) * (options.n or 1)
    most = options.max_tokens or 0
    context = model.max_model_len
    return RequestBudget(
        num_prompts=num_answers,
        num_json_bytes=num_bytes,
        num_text_bytes=sum(len(each.encode()) for each in received if isinstance(each, str)),
        num_answer_tokens=num_answers * (most if context is None else min(most, context)),
        **stop_amounts(options),
    )


async def _tokens_and_text(
    service: PromptService, prompt: str | list[int], wanted: CompletionRequest, place: str
) -> tuple[tuple[int, ...], str]:
    """Returns both forms of a prompt. Raises RequestError for tokens outside the vocabulary."""
    if isinstance(prompt, str):
        with_special = wanted.add_special_tokens is not False
        return await service.tokens(prompt, with_special=with_special), prompt
    try:
        return tuple(prompt), await service.text(prompt)
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error


def _check_length(token_ids: Sequence[int], model: ModelCard, place: str) -> None:
    most = model.max_model_len
    if not token_ids or (most is not None and len(token_ids) >= most):
        allowed = "at least one" if most is None else f"1 to {most - 1:,}, to leave room for an answer"
        raise RequestError(f"{place}: received {len(token_ids):,} tokens; allowed: {allowed}; change it")


@answer_routes.post(
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
    return AnswerResponse(
        partial(CompletionWhole, record, echoed, has_logprobs=has_logprobs),
        partial(
            CompletionChunks,
            record,
            echoed,
            has_logprobs=has_logprobs,
            includes_usage=includes_usage,
            counted_prompt=sum(map(len, asked.prompts)) if counts_on else None,
        ),
        _items(server, asked, record),
        record,
        server.settings.keep_alive_s,
    )


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


@answer_routes.post("/invocations", responses=EVENT_STREAM, openapi_extra=body_of("ChatRequest"))
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


@answer_routes.post(
    "/v1/responses",
    response_model=ResponseReply,
    responses=EVENT_STREAM,
    openapi_extra=body_of("ResponseRequest"),
)
async def responses(request: Request) -> Response:
    """Answers a conversation about images and videos, at once or as a stream of typed events."""
    server, record = server_of(request), record_of(request)
    wanted, num_bytes = await server.read_json(request, ResponseRequest)
    parsed = await server.checked(request, chat_of(wanted), num_bytes)
    begun, parsing = _begun(server, wanted, record), server.parsing_of(parsed)
    make = partial(ResponseBuilder, record, begun, parsing=parsing)
    return AnswerResponse(make, make, server.items(parsed, record), record, server.settings.keep_alive_s)


def _begun(server: ServerState, wanted: ResponseRequest, record: RequestRecord) -> ResponseReply:
    """Returns the response before its output."""
    defaults = server.settings.default_params
    return ResponseReply(
        id=record.request_id,
        created_at=int(record.arrival_s),
        status="in_progress",
        model=record.model,
        instructions=wanted.instructions,
        max_output_tokens=wanted.max_output_tokens,
        temperature=defaults.temperature if wanted.temperature is None else wanted.temperature,
        top_p=defaults.top_p if wanted.top_p is None else wanted.top_p,
        text={"format": {"type": "text"}} | (_shown(wanted.text) if wanted.text else {}),
        tools=[_shown(tool) for tool in wanted.tools or ()],
        tool_choice=_shown(wanted.tool_choice)
        if isinstance(wanted.tool_choice, BaseModel)
        else wanted.tool_choice or "auto",
        parallel_tool_calls=wanted.parallel_tool_calls is not False,
        top_logprobs=wanted.top_logprobs or 0,
        metadata=wanted.metadata or {},
    )


def _shown(received: BaseModel) -> dict[str, Any]:
    """Returns the JSON of a part of the request as it was received."""
    return received.model_dump(by_alias=True, exclude_none=True)
