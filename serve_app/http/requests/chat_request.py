"""Defines the JSON of chat requests: OpenAI's fields, vLLM's names for what these lack, ours in `epd`.

Types are strict, as OpenAI's are: "1" is not a number. No field of the request is ignored silently: those not
defined here are in `request_fields`, or refused as unknown. Messages are in `chat_messages`.
Validation of a list stops at the first error, to save time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from epd.reduction import LEAST_RETENTION, METHODS
from epd.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_INT64,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
)
from epd.serve_app.http.requests.chat_messages import Listed, Message
from epd.serve_app.http.requests.request_fields import CHAT_FIELDS, Sent

MAX_SALT_CHARS = 1024
MAX_TOOLS = 128

_T = TypeVar("_T")
Int64 = Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)]
Count = Annotated[int, Field(ge=1, le=MAX_INT64)]
Count0 = Annotated[int, Field(ge=0, le=MAX_INT64)]
# A list with at least one element, whose validation stops at the first wrong one.
Filled = Annotated[list[_T], Field(min_length=1, fail_fast=True)]
# Of a chat template, by name.
Variables = Annotated[dict[str, Any], Field(max_length=64)]
# Token ids without leading zeros, so that each has one spelling.
Biases = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)],
    ],
    Field(max_length=MAX_BIASES),
]
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]


class Received(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class FunctionDefinition(Sent):
    """A function that an answer may call. parameters: a schema of its arguments; by default none."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="Changes nothing: see docs/api.md.")


class Tool(Sent):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Received):
    name: str


class ToolChoice(Received):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class StreamOptions(Received):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="Changes nothing.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="Tokens so far in every event, where include_usage is true."
    )


class JsonSchema(Received):
    """A schema that the answer is valid by, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Received):
    """The format of the answer. json_schema: with that type, which needs it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Received):
    """vLLM's formats of the answer: one of the first five.

    disable_any_whitespace: false lets spaces and new lines stand between the parts of JSON
    whitespace_pattern: what may stand there
    """

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class FrameOptions(Received):
    """The options of vLLM that select the frames of a video."""

    fps: Annotated[float, Field(gt=0)] | None = None
    num_frames: Count | None = None
    do_sample_frames: bool | None = Field(
        default=None, description="False takes every frame of a video; of a list of frames always false."
    )


class PixelSize(Received):
    """The limits of a transformers processor, both in pixels, not edges."""

    shortest_edge: Count
    longest_edge: Count


class ProcessorOptions(FrameOptions):
    """vLLM's `mm_processor_kwargs`: frames of videos, and how many pixels images and frames have."""

    min_pixels: Count | None = None
    max_pixels: Count | None = None
    size: PixelSize | None = Field(default=None, description="Both limits at once; the two above come after.")
    cap_pixels_per_frame: bool | None = Field(
        default=None, description="Whether frames are held to the limits of the model's authors."
    )


class VideoLoading(FrameOptions):
    """vLLM's `media_io_kwargs` of videos: which frames are read, and when those of a list were on screen."""

    frames_indices: Listed[Count0] | None = Field(
        default=None, description="Of a list of frames: each one's index in the video they come from."
    )
    total_num_frames: Count | None = Field(default=None, description="Of that video.")
    duration: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Of that video, seconds."
    )


class ImageLoading(Received):
    image_mode: Literal["RGB"] | None = None


class MediaLoading(Received):
    """vLLM's `media_io_kwargs`, by kind of medium."""

    image: ImageLoading | None = None
    video: VideoLoading | None = None


class EpdOptions(Received):
    """This server's own options.

    deadline_s: of the first token, in seconds from arrival
    events: also answer what the stages do
    """

    fps: Annotated[float, Field(gt=0)] | None = Field(default=None, description="Frames per second of video.")
    num_frames: Count | None = Field(default=None, description="Frames of each video, evenly spread.")
    start_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Look at each video, and hear each clip of sound, from here on, seconds."
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
    compute_share: float | None = Field(
        default=None,
        description="Share of the visual tokens that later layers of the language model compute, with the "
        "reduction fastkv; by default the retention.",
        json_schema_extra={"minimum": LEAST_RETENTION, "maximum": 1},
    )
    retention_min: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Least share of the visual tokens that is kept when load calls for fewer."
    )
    max_visual_tokens: Count | None = Field(
        default=None,
        description="Visual tokens that frames and retention are chosen for, within the server's own limit.",
    )
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    events: bool | None = None


class AnswerFields(Received):
    """The fields that every request for an answer has, under the same names."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Count0 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Listed[Count0] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Biases | None = Field(default=None, description="By token id.")
    bad_words: BadWords | None = Field(default=None, description="That answers do not contain.")
    priority: Int64 | None = Field(
        default=None, description="The lower, the sooner; 0 by default, above it what nobody waits for."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = Field(
        default=None, description="What is cached is shared only with requests of the same salt."
    )


class ChatRequest(AnswerFields):
    """A chat completion. Omitted fields take the server's defaults; temperature 0 is greedy."""

    model_config = ConfigDict(json_schema_extra=CHAT_FIELDS.add_to)

    messages: Filled[Message]
    stream_options: StreamOptions | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = Field(default=None, description="The old name of max_completion_tokens.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether `required` allows several calls; by default it does."
    )
    modalities: Listed[str] | None = Field(default=None, description="Only text.")
    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaLoading | None = None
    chat_template_kwargs: Variables | None = Field(
        default=None, description="Variables of the model's chat template; it ignores those it does not read."
    )
    epd: EpdOptions | None = None

    def frame_options(self) -> tuple[EpdOptions | FrameOptions, ...]:
        """Returns what was received about frames of videos, from the three places that take it."""
        return tuple(each for each in (self.epd, self.mm_processor_kwargs, self.video_loading()) if each)

    def samples_frames(self) -> bool | None:
        """Returns whether frames are chosen from videos, None if it was not said. False outweighs true."""
        said = [
            options.do_sample_frames
            for options in (self.mm_processor_kwargs, self.video_loading())
            if options
        ]
        return False if False in said else True if True in said else None

    def video_loading(self) -> VideoLoading:
        """Returns what was received about how videos are read."""
        return (self.media_io_kwargs and self.media_io_kwargs.video) or VideoLoading()
