"""Defines the JSON of `/v1/responses`: OpenAI's fields, and those of chat requests under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from epd.sampling_params import MAX_INT64, MAX_LOGPROBS, MAX_STOP_STRINGS
from epd.serve_app.http.requests.chat_request import (
    MAX_SALT_CHARS,
    MAX_TOOLS,
    AssistantMessage,
    BadWords,
    Biases,
    Count,
    Count0,
    EpdOptions,
    Filled,
    FunctionDefinition,
    Int64,
    Listed,
    MediaLoading,
    ProcessorOptions,
    StructuredOutputs,
    SystemMessage,
    UserMessage,
    UserPart,
    Variables,
)
from epd.serve_app.http.requests.request_fields import NO_EFFECT, REFUSED, OtherFields
from epd.serve_app.http.requests.sent_fields import Sent

_SHARED_NO_EFFECT = (
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "service_tier", "session_id", "user",
)  # fmt: skip
_SHARED_REFUSED = (
    "allowed_token_ids", "chat_template", "ec_transfer_params",
    "kv_transfer_params", "moderation", "request_id", "skip_special_tokens", "vllm_xargs",
)  # fmt: skip
_WHOLE = "send the whole conversation as input"
RESPONSE_FIELDS = OtherFields(
    no_effect={
        **{name: NO_EFFECT[name] for name in _SHARED_NO_EFFECT},
        "store": "nothing is kept, true or false",
    },
    refused={
        **{name: REFUSED[name] for name in _SHARED_REFUSED},
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "enable_response_messages": (False,),
        "image": (),
        "max_tool_calls": (),
        "previous_input_messages": (),
        "previous_response": (),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": ({}, {"effort": None}, {"effort": "none"}),
        "truncation": ("disabled",),
    },
    advice={
        "background": "leave it out and set stream, or use `epd batch`",
        "conversation": _WHOLE,
        "previous_response": _WHOLE,
        "previous_response_id": _WHOLE,
        "prompt": "send instructions and input",
        "truncation": "shorten the input",
    },
)

# What is not the same as of a chat request, in Markdown, by field.
RESPONSE_HONOURED: Mapping[str, str] = {
    "input": "a text, or items: messages, `function_call`, `function_call_output`, `reasoning`; see below",
    "instructions": "a message of the system before the input",
    "stream": "OpenAI's typed events, with a comment while nothing comes",
    "stream_options": "`include_obfuscation`, which changes nothing",
    "max_output_tokens": "as a chat's `max_completion_tokens`",
    "text": "`format`: `text`, `json_object`, `json_schema`, see structured output; `verbosity`: `medium`",
    "tool_choice": "`none`, `auto`, `required`, or `{type: function, name}`",
    "include": (
        "`message.output_text.logprobs`, not with tools; `reasoning.encrypted_content`, which changes nothing"
    ),
    "top_logprobs": "at most 20, with the logprobs that `include` names",
    "metadata": "comes back in the response; nothing is stored",
    "epd": "as a chat's, without `events`",
}


class _Received(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class FunctionCall(Sent):
    """A call that the model wrote. arguments: JSON, as a text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Sent):
    """What a called function returned: texts, and media to look at."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Listed[UserPart]


class ReasoningItem(Sent):
    """What a model thought, as clients send it back: ignored."""

    type: Literal["reasoning"]


_ROLES = ("system", "developer", "user", "assistant")
_ITEMS = ("function_call", "function_call_output", "reasoning")


def _item_type(item: object) -> str | None:
    """Returns the tag of an item: its type, of a message its role."""
    get = item.get if isinstance(item, dict) else partial(getattr, item)
    found = get("type", None) or "message"
    role = get("role", None)
    return found if found in _ITEMS else role if found == "message" and role in _ROLES else None


InputItem = Annotated[
    Annotated[SystemMessage, Tag("system")]
    | Annotated[SystemMessage, Tag("developer")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="item",
        custom_error_message=f"received another item; allowed: messages of {', '.join(_ROLES)}, and "
        f"{', '.join(_ITEMS)}; leave it out",
    ),
]


class FunctionTool(FunctionDefinition):
    """A function that an answer may call."""

    type: Literal["function"]


class NamedFunction(_Received):
    """The one function that is to be called."""

    type: Literal["function"]
    name: str


class TextFormat(_Received):
    """The format of the answer. name, description, schema, strict: of a json_schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(_Received):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(_Received):
    include_obfuscation: bool | None = Field(default=None, description="Changes nothing.")


class ResponseRequest(BaseModel):
    """A response. Omitted fields take the server's defaults; temperature 0 is greedy."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, json_schema_extra=RESPONSE_FIELDS.add_to
    )

    model: str | None = None
    input: str | Filled[InputItem]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    include: Listed[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
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
    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaLoading | None = None
    chat_template_kwargs: Variables | None = None
    priority: Int64 | None = Field(default=None, description="The lower, the sooner.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    epd: EpdOptions | None = None

    @property
    def has_logprobs(self) -> bool:
        """Returns whether the logprobs of the answer's tokens are wanted."""
        return "message.output_text.logprobs" in (self.include or ())
