"""The JSON that the HTTP interface sends, and that of its smaller routes. See `chat_request` for requests."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_app.service import RetentionStatus, RoleSwitch, WorkerStatus


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[ContentLogprob] | None = None
    refusal: None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class UsageReport(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpanReport(BaseModel):
    """Work on a request that is done; seconds count from its arrival."""

    stage: str
    worker: str
    start_s: float
    stop_s: float
    item: int | None = None
    group: int | None = None


class EpdReport(BaseModel):
    """What the request took. Seconds by stage, of service and of waiting; stages overlap.

    retention: share of the visual tokens that was to be kept.
    substituted_frames: of the frames, those that could not be decoded and show a neighbour.
    """

    frames: int
    substituted_frames: int
    visual_tokens: int
    visual_tokens_before_reduction: int
    retention: float
    cached_tokens: int
    ttft_s: float
    total_s: float
    stages_s: dict[str, float]
    queued_s: dict[str, float]
    retries: int


class EpdEvents(BaseModel):
    events: list[SpanReport]


class ReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageReport
    epd: EpdReport


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(BaseModel):
    """One event of a stream. usage: in the last, if asked for. epd: spans; at the end, the report."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageReport | None = None
    epd: EpdEvents | EpdReport | None = None


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "epd"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    error: ErrorBody


class Health(BaseModel):
    status: Literal["ok", "unavailable"]


class DecisionReport(BaseModel):
    """Whether a change of roles was called for by the load, and why."""

    model_config = ConfigDict(from_attributes=True)

    at_s: float
    verdict: str
    reason: str


class StatusReport(BaseModel):
    """The service as it is now. roles: one letter each, v video decoding, e encode, p prefill, d decode.

    num_waiting: requests that no worker has taken yet. switches, decisions: the last ones, oldest first;
    decisions of an elastic service alone. retention: null where it does not follow the load.
    """

    is_ready: bool
    topology: str
    num_requests: int
    num_waiting: int
    workers: tuple[WorkerStatus, ...]
    switches: tuple[RoleSwitch, ...]
    decisions: list[DecisionReport]
    retention: RetentionStatus | None


class RolesRequest(BaseModel):
    """A worker, and the roles that it is to have."""

    model_config = ConfigDict(strict=True, extra="forbid")

    worker: str
    roles: list[Literal["encode", "prefill", "decode"]] = Field(min_length=1, max_length=3)


class LoadEntry(BaseModel):
    """A request of the last ten minutes, as planned. age_s: since it came. max_tokens: of its answers.

    expected_tokens: of its answers, where max_tokens is what the context has room for; else the same.
    """

    age_s: float
    num_patches: int
    num_prompt_tokens: int
    max_tokens: int
    expected_tokens: int | None = None


class LoadReport(BaseModel):
    """What was asked for in the last ten minutes, oldest first."""

    requests: list[LoadEntry]
