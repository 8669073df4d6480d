"""Answers `/v1/responses`: the same answers as of chat completions, in the form of OpenAI's responses."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from epd.serve_app.http.answers.answer_response import AnswerForm, AnswerResponse
from epd.serve_app.http.answers.response_answer import ResponseBuilder
from epd.serve_app.http.answers.response_protocol import ResponseReply
from epd.serve_app.http.requests.response_request import ResponseRequest, chat_of
from epd.serve_app.http.routes.prompt_routes import EVENT_STREAM, body_of, server_of
from epd.serve_app.http.server_state import ServerState
from epd.serve_app.observability.record import RequestRecord, record_of

response_routes = APIRouter()


@response_routes.post(
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
    form = AnswerForm(whole=make, events=make)
    return AnswerResponse(form, server.items(parsed, record), record, server.settings.keep_alive_s)


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
