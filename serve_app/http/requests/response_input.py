"""Turns a request of `/v1/responses` into the chat request that asks the same."""

from __future__ import annotations

from epd.errors import RequestError
from epd.serve_app.http.requests.chat_request import (
    AssistantMessage,
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    FunctionText,
    JsonSchema,
    Message,
    ResponseFormat,
    SystemMessage,
    Tool,
    ToolCallText,
    ToolChoice,
    ToolMessage,
    UserMessage,
)
from epd.serve_app.http.requests.response_request import (
    RESPONSE_FIELDS,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputItem,
    NamedFunction,
    ReasoningItem,
    ResponseRequest,
    TextFormat,
)

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
