"""The JSON of the HTTP interface: OpenAI's chat completions, vLLM's names for what that lacks, ours in `epd`.

Types are strict, as OpenAI's are: "1" is no number. Fields nobody here knows are ignored, as clients send
many; in `epd` and `mm_processor_kwargs` they are errors, because there they are meant for this server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from epd.reduction import LEAST_RETENTION, METHODS
from epd.sampling_params import MAX_CHOICES, MAX_INT64, MAX_LOGPROBS, MAX_STOP_STRINGS

MAX_MESSAGES = 1024
MAX_PARTS = 1024

Int64 = Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)]
Count = Annotated[int, Field(ge=1, le=MAX_INT64)]


class _Received(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Ours(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(_Received):
    type: Literal["text"]
    text: str


class MediaUrl(_Received):
    """url: http(s), data: with base64, or file: within the folder that the server allows."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = Field(default=None, description="Ignored.")


class ImagePart(_Received):
    type: Literal["image_url"]
    image_url: MediaUrl


class VideoPart(_Received):
    type: Literal["video_url"]
    video_url: MediaUrl


UserPart = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]


class SystemMessage(_Received):
    role: Literal["system", "developer"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]


class UserMessage(_Received):
    role: Literal["user"]
    content: str | Annotated[list[UserPart], Field(min_length=1, max_length=MAX_PARTS)]


class AssistantMessage(_Received):
    role: Literal["assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]


Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


class StreamOptions(_Received):
    include_usage: bool | None = None


class ResponseFormat(_Received):
    """Only `text`; the others are known so that they are refused in words."""

    type: Literal["text", "json_object", "json_schema"]


class ProcessorOptions(_Ours):
    """vLLM's `mm_processor_kwargs`, as far as it says which frames of a video to take."""

    fps: Annotated[float, Field(gt=0)] | None = None
    num_frames: Count | None = None


class EpdOptions(_Ours):
    """Ours. deadline_s: of the first token, seconds from arrival. events: stream what stages do, too."""

    fps: Annotated[float, Field(gt=0)] | None = Field(default=None, description="Frames per second of video.")
    num_frames: Count | None = Field(default=None, description="Frames of each video, evenly spread.")
    start_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Look at each video from here on, seconds."
    )
    end_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="And up to here; by default to its end."
    )
    retention: float | None = Field(
        default=None,
        description="Share of the visual tokens that is kept; 1 keeps all.",
        json_schema_extra={"minimum": LEAST_RETENTION, "maximum": 1},
    )
    reduction: str | None = Field(
        default=None,
        description="How the kept tokens are chosen; by default as the server has it.",
        json_schema_extra={"enum": [*METHODS, None]},
    )
    retention_min: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Least share of the visual tokens that is kept when load calls for fewer."
    )
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    events: bool = False


class ChatRequest(_Received):
    """A chat completion. What is left out is as the server's defaults have it; temperature 0 is greedy."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = Field(default=None, description="The old name of max_completion_tokens.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = Field(default=None, description="Refused unless empty.")
    functions: list[Any] | None = Field(default=None, description="Refused unless empty.")
    logit_bias: dict[str, float] | None = Field(default=None, description="Refused unless empty.")
    modalities: list[str] | None = Field(default=None, description="Only text.")

    top_k: Annotated[int, Field(ge=-1, le=MAX_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MAX_INT64)]] | None = None
    include_stop_str_in_output: bool | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    priority: Int64 | None = Field(
        default=None, description="The lower, the sooner; 0 by default, above it what nobody waits for."
    )

    epd: EpdOptions | None = None


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


class WorkerReport(BaseModel):
    name: str
    roles: str
    is_alive: bool
    num_waiting: int
    num_running: int
    kv_usage: float | None
    encoder_cache_usage: float | None
    num_role_switches: int
    is_switching: bool


class SwitchReport(BaseModel):
    """A worker's change of roles. before, after: letters as in StatusReport. error: why it was rolled back.

    at_s: Unix time in seconds. Seconds: of its phases; weights_s: of onload, for finding weights.
    num_handed_on, num_moved, num_redone: work that went to others before it was begun, in its middle, or was
    done again.
    """

    worker: str
    before: str
    after: str
    at_s: float
    offload_s: float
    migrate_s: float
    onload_s: float
    announce_s: float
    weights_s: float
    num_handed_on: int
    num_moved: int
    num_redone: int
    error: str


class DecisionReport(BaseModel):
    """Whether roles were to be changed by the load, and why."""

    at_s: float
    verdict: str
    reason: str


class LevelChangeReport(BaseModel):
    """Of retention, by the load. ttft_s: predicted at the new level. at_s: Unix time in seconds."""

    at_s: float
    before: float
    after: float
    ttft_s: float
    reason: str


class RetentionReport(BaseModel):
    """The share of visual tokens that the load allows. changes: the last ones, oldest first."""

    level: float
    predicted_ttft_s: float
    num_changes: int
    changes: list[LevelChangeReport]


class StatusReport(BaseModel):
    """The service as it is now. roles: one letter each, v video decoding, e encode, p prefill, d decode.

    num_waiting: requests that no worker has taken yet. switches, decisions: the last ones, oldest first;
    decisions of an elastic service alone. retention: null where it does not follow the load.
    """

    is_ready: bool
    topology: str
    num_requests: int
    num_waiting: int
    workers: list[WorkerReport]
    switches: list[SwitchReport]
    decisions: list[DecisionReport]
    retention: RetentionReport | None


class RolesRequest(_Received):
    """A worker, and the roles that it is to have."""

    model_config = ConfigDict(extra="forbid")

    worker: str
    roles: list[Literal["encode", "prefill", "decode"]] = Field(min_length=1, max_length=3)


class LoadEntry(BaseModel):
    """A request of the last ten minutes, as planned. age_s: since it came. max_tokens: of its answers."""

    age_s: float
    num_patches: int
    num_prompt_tokens: int
    max_tokens: int


class LoadReport(BaseModel):
    """What was asked for in the last ten minutes, oldest first."""

    requests: list[LoadEntry]
