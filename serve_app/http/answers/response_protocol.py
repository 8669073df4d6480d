"""Defines the JSON that `/v1/responses` sends."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from epd.serve_app.http.protocol import EpdReport

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ResponseLogprob(ResponseTopLogprob):
    top_logprobs: list[ResponseTopLogprob]


class ResponseText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[ResponseLogprob] = []


class ResponseMessage(BaseModel):
    """An answer. content: one text, none before it has begun."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[ResponseText]


class ResponseCall(BaseModel):
    """A call of a function. arguments: JSON, as the model wrote it."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ResponseThought(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ResponseReasoning(BaseModel):
    """What a model thought before its answer. content: one text, none before it has begun."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[ResponseText] = []
    content: list[ResponseThought]


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(BaseModel):
    """A response. The fields after `usage` are those of the request, or what is used in their place.

    An error is a status or an event of its own, so a response has no `error`: clients that ask for its
    message where the name is there would fail on a null.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ItemStatus
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[ResponseMessage | ResponseCall | ResponseReasoning] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    top_logprobs: int
    metadata: dict[str, str]
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    epd: EpdReport | None = None
