"""Defines the JSON of `/v1/responses`, and turns a request of it into the chat request that asks the same.

Fields are OpenAI's, and those of chat requests under the same names.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from epd.errors import RequestError
from epd.sampling_params import MAX_LOGPROBS
from epd.serve_app.http.requests.chat_messages import (
    AssistantMessage,
    FunctionText,
    Listed,
    Message,
    SystemMessage,
    ToolCallText,
    ToolMessage,
    UserMessage,
    UserPart,
)
from epd.serve_app.http.requests.chat_request import (
    MAX_TOOLS,
    AnswerFields,
    ChatRequest,
    Count,
    EpdOptions,
    Filled,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    MediaLoading,
    ProcessorOptions,
    Received,
    ResponseFormat,
    Tool,
    ToolChoice,
    Variables,
)
from epd.serve_app.http.requests.request_fields import NO_EFFECT, REFUSED, OtherFields, Sent

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


class NamedFunction(Received):
    """The one function that is to be called."""

    type: Literal["function"]
    name: str


class TextFormat(Received):
    """The format of the answer. name, description, schema, strict: of a json_schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Received):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(Received):
    include_obfuscation: bool | None = Field(default=None, description="Changes nothing.")


class ResponseRequest(AnswerFields):
    """A response. Omitted fields take the server's defaults; temperature 0 is greedy."""

    model_config = ConfigDict(json_schema_extra=RESPONSE_FIELDS.add_to)

    input: str | Filled[InputItem]
    instructions: str | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    include: Listed[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: dict[str, str] | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaLoading | None = None
    chat_template_kwargs: Variables | None = None
    epd: EpdOptions | None = None

    @property
    def has_logprobs(self) -> bool:
        """Returns whether the logprobs of the answer's tokens are wanted."""
        return "message.output_text.logprobs" in (self.include or ())


_SAME_NAME = [
    name
    for name in ResponseRequest.model_fields.keys() & ChatRequest.model_fields.keys()
    if name not in {"tools", "tool_choice", "stream_options", "top_logprobs"}
]


def chat_of(wanted: ResponseRequest) -> ChatRequest:
    """Returns the chat request. Raises RequestError, by the names of the response's fields."""
    _check_supported(wanted)
    choice = wanted.tool_choice
    named = (
        ToolChoice(type="function", function=FunctionName(name=choice.name))
        if isinstance(choice, NamedFunction)
        else choice
    )
    said = {name: getattr(wanted, name) for name in _SAME_NAME if name in wanted.model_fields_set}
    return ChatRequest(
        messages=_messages(wanted),
        max_completion_tokens=wanted.max_output_tokens,
        response_format=_format(wanted.text.format) if wanted.text and wanted.text.format else None,
        tools=None if wanted.tools is None else list(map(_tool, wanted.tools)),
        tool_choice=named,
        logprobs=wanted.has_logprobs or None,
        top_logprobs=wanted.top_logprobs,
        **said,
    )


def _check_supported(wanted: ResponseRequest) -> None:
    RESPONSE_FIELDS.check(wanted.model_extra or {}, ResponseRequest.model_fields)
    if wanted.has_logprobs and wanted.tools and wanted.tool_choice != "none":
        raise RequestError(
            "received include message.output_text.logprobs with tools; allowed: one of the two; leave one out"
        )
    if wanted.top_logprobs and not wanted.has_logprobs:
        raise RequestError(
            "received top_logprobs alone; allowed: with include message.output_text.logprobs; add it"
        )
    if wanted.epd and wanted.epd.events:
        raise RequestError("received epd.events; allowed: false; ask for them in /v1/chat/completions")


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.json_schema is None:
        raise RequestError(
            "received text.format of type json_schema without schema; allowed: with it; add it"
        )
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=wanted.json_schema))


def _tool(tool: FunctionTool) -> Tool:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _messages(wanted: ResponseRequest) -> list[Message]:
    said: list[Message] = []
    if wanted.instructions:
        said.append(SystemMessage(role="system", content=wanted.instructions))
    if isinstance(wanted.input, str):
        return [*said, UserMessage(role="user", content=wanted.input)]
    for item in wanted.input:
        _add(said, item)
    if not said:
        raise RequestError("received an input without messages; allowed: one of the user at least; add it")
    return said


def _add(said: list[Message], item: InputItem) -> None:
    """Adds an item to the messages. A call belongs to the message of the assistant before it."""
    if isinstance(item, FunctionCallOutput):
        said.append(ToolMessage(role="tool", content=item.output, tool_call_id=item.call_id))
    elif isinstance(item, FunctionCall):
        last = said[-1] if said else None
        if not isinstance(last, AssistantMessage):
            last = AssistantMessage(role="assistant")
            said.append(last)
        last.tool_calls = [*(last.tool_calls or ()), _call(item)]
    elif not isinstance(item, ReasoningItem):
        said.append(item)


def _call(item: FunctionCall) -> ToolCallText:
    function = FunctionText(name=item.name, arguments=item.arguments)
    return ToolCallText(id=item.call_id, function=function)
