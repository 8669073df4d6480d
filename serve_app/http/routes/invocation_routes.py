"""Answers `/invocations`, where hosts of containers send whatever a model is asked, as vLLM does."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from epd.errors import RequestError
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.completion_request import CompletionRequest
from epd.serve_app.http.requests.request_parsing import describe
from epd.serve_app.http.routes.chat_answer import chat_answer
from epd.serve_app.http.routes.completion_parsing import checked_completion
from epd.serve_app.http.routes.completion_routes import completion_answer
from epd.serve_app.http.routes.prompt_routes import EVENT_STREAM, body_of, server_of
from epd.serve_app.observability.record import record_of

invocation_routes = APIRouter()


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
