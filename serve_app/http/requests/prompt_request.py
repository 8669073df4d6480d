"""Defines the JSON of routes that look at prompts and answer nothing, with vLLM's names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from epd.sampling_params import MAX_INT64
from epd.serve_app.http.requests.chat_messages import Listed, Message
from epd.serve_app.http.requests.chat_request import (
    MAX_TOOLS,
    EpdOptions,
    Filled,
    MediaLoading,
    ProcessorOptions,
    Received,
    Tool,
)


class TokenizeRequest(Received):
    """A text, or a conversation, of which the tokens are wanted: one of the two.

    add_special_tokens: of a text, by default true, as in vLLM; a conversation has its template's
    return_token_strs: whether each token is wanted as a string, too
    """

    model: str | None = None
    prompt: str | None = None
    messages: Filled[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaLoading | None = None
    epd: EpdOptions | None = None


class DetokenizeRequest(Received):
    """Tokens of which the text is wanted."""

    model: str | None = None
    tokens: Listed[Annotated[int, Field(ge=0, le=MAX_INT64)]]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int | None
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeReply(BaseModel):
    prompt: str


class MediumReply(BaseModel):
    """What would be taken of one medium. visual_tokens: before they are reduced"""

    kind: Literal["image", "video", "audio"]
    frames: int
    height: int
    width: int
    visual_tokens: int


class EstimateReply(BaseModel):
    """What a chat request would use, under the names of its answer.

    fits: whether it would be answered; the other numbers are null if not, and `reason` is the answer's error
    media: of each, in order, the frames and their size in pixels as the model gets them
    max_completion_tokens: the longest answer there is room for, or less where the request says so
    """

    object: Literal["epd.estimate"] = "epd.estimate"
    model: str
    fits: bool
    reason: str | None = None
    max_model_len: int | None = None
    prompt_tokens: int | None = None
    frames: int | None = None
    video_s: float | None = None
    visual_tokens: int | None = None
    visual_tokens_before_reduction: int | None = None
    retention: float | None = None
    max_completion_tokens: int | None = None
    media: list[MediumReply] | None = None
