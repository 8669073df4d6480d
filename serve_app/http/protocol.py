"""Defines the JSON that the HTTP interface sends, and its smaller requests. See `chat_request` for chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from epd.control.elasticity.replicas import ReplicaAdvice
from epd.serve_app.service_status import RetentionStatus, RoleSwitch, WorkerStatus


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
    """The tokens of a request. cache_read_input_tokens: the cached ones again, under vLLM's name."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    cache_read_input_tokens: int


class KeptReport(BaseModel):
    """Which tokens of units [first_unit, first_unit + num_units) of a video are kept.

    frames_per_unit: the last unit may have fewer
    rows, columns: tokens of a unit, over the whole picture
    bits: base64, one bit for each token, by unit, row and column, from the high end of each byte; 1 is kept
    """

    first_unit: int
    num_units: int
    frames_per_unit: int
    rows: int
    columns: int
    bits: str


class SpanReport(BaseModel):
    """Completed work on a request; seconds count from its arrival.

    frame_times_s: of a video that was planned, stage `probe`: the time in it of each frame that is looked at
    kept: of a video of which fewer tokens are kept, stage `prefill`: what was chosen before the model
    frames: of an encoded group; of all media where stage `probe` has no item
    notes: of stage `probe` without an item, for people: what media are held to, and the plan of each
    choice: of the same: what was chosen where not all frames and tokens have room
    """

    stage: str
    worker: str
    start_s: float
    stop_s: float
    item: int | None = None
    group: int | None = None
    frame_times_s: list[float] | None = None
    kept: list[KeptReport] | None = None
    frames: int | None = None
    notes: list[str] | None = None
    choice: str | None = None


class TierReport(BaseModel):
    """What was found in a tier. tokens: of the prompt, or embeddings. bytes: read for them; 0 in memory."""

    tokens: int
    bytes: int


class CacheReport(BaseModel):
    """What was found instead of being computed, by tier: memory, disk, objects.

    frames: that were not read, since what they become was found
    """

    frames: int
    embeddings: dict[str, TierReport]
    kv: dict[str, TierReport]


class EpdReport(BaseModel):
    """The cost of the request. Seconds by stage, of service and of waiting; stages overlap.

    video_s: seconds of video that the frames stand for
    retention: share of the visual tokens that was to be kept
    substituted_frames: number of frames that could not be decoded and show a neighbour
    unseen_frames: of animated pictures that were sent as images, all frames but the first of each
    cache: what was found, only where something is kept on disk
    events: what the stages did, only where it was asked for and the answer is no stream
    """

    frames: int
    video_s: float
    substituted_frames: int
    unseen_frames: int
    visual_tokens: int
    visual_tokens_before_reduction: int
    retention: float
    cached_tokens: int
    ttft_s: float
    total_s: float
    stages_s: dict[str, float]
    queued_s: dict[str, float]
    retries: int
    cache: CacheReport | None = Field(default=None, exclude_if=lambda cache: cache is None)
    events: list[SpanReport] | None = Field(default=None, exclude_if=lambda events: events is None)


class EpdEvents(BaseModel):
    events: list[SpanReport]


class FunctionReport(BaseModel):
    """A called function. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class CallReport(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionReport


class ReplyMessage(BaseModel):
    """An answer. content: null beside calls alone. tool_calls: null without any.

    reasoning: what the model thought before, only there if it did. reasoning_content: its former name.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[CallReport] | None = None
    reasoning: str | None = Field(default=None, exclude_if=lambda thought: thought is None)
    reasoning_content: str | None = Field(default=None, exclude_if=lambda thought: thought is None)


class Choice(BaseModel):
    index: int
    message: ReplyMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageReport
    service_tier: None = None
    system_fingerprint: str | None = None
    prompt_logprobs: None = None
    epd: EpdReport


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """The next piece of a call. id, type: in the first piece alone."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None


class ChatChunk(BaseModel):
    """One event of a stream. usage: in the last event, if requested. epd: spans; in the end, the report."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageReport | None = None
    epd: EpdEvents | EpdReport | None = None


class ModelEntry(BaseModel):
    """A model, or a LoRA adapter as one.

    root: the folder of an adapter. parent: the model that it computes beside.
    limits: the ceilings of one request. defaults: of its options. knows: where that is little.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "epd"
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    knows: str | None = None
    limits: dict[str, int | None]
    defaults: dict[str, str | float | int | None]


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


class ServerLoad(BaseModel):
    """Counts the requests that are being answered, under vLLM's name."""

    server_load: int


class Version(BaseModel):
    version: str


class Health(BaseModel):
    status: Literal["ok", "unavailable"]


class DecisionReport(BaseModel):
    """A decision whether the load requires a change of roles, with its reason."""

    model_config = ConfigDict(from_attributes=True)

    at_s: float
    verdict: str
    reason: str


class StatusReport(BaseModel):
    """The current state of the service.

    roles: one letter each, v video decoding, e encode, p prefill, d decode
    num_waiting: requests that no worker has taken yet
    switches, decisions: the last ones, oldest first; decisions only of an elastic service
    advice: of each deployment whose replicas follow the load
    retention: null if it does not follow the load
    """

    is_ready: bool
    topology: str
    num_requests: int
    num_waiting: int
    workers: tuple[WorkerStatus, ...]
    switches: tuple[RoleSwitch, ...]
    decisions: list[DecisionReport]
    advice: Mapping[str, ReplicaAdvice]
    retention: RetentionStatus | None


class RolesRequest(BaseModel):
    """A worker, and its requested roles."""

    model_config = ConfigDict(strict=True, extra="forbid")

    worker: str
    roles: list[Literal["encode", "prefill", "decode"]] = Field(min_length=1, max_length=3)


class LoadEntry(BaseModel):
    """A request of the last ten minutes, as planned.

    age_s: since its arrival
    max_tokens: of its answers
    expected_tokens: of its answers, if max_tokens is only limited by the context; else the same
    """

    age_s: float
    num_patches: int
    num_prompt_tokens: int
    max_tokens: int
    expected_tokens: int | None = None


class LoadReport(BaseModel):
    """The requests of the last ten minutes, oldest first."""

    requests: list[LoadEntry]
