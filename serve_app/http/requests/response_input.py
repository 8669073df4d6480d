"""Turns a request of `/v1/responses` into the chat request that asks the same."""

from __future__ import annotations

from collections.abc import Sequence

from epd.errors import RequestError
from serve_app.http.requests.chat_request import (
    AssistantMessage,
    AssistantPart,
    AudioPart,
    ChatRequest,
    FunctionDefinition,
    FunctionName,
    FunctionText,
    ImagePart,
    ImageUrl,
    InputAudioPart,
    JsonSchema,
    Message,
    RefusalPart,
    ResponseFormat,
    SystemMessage,
    TextPart,
    Tool,
    ToolCallText,
    ToolChoice,
    ToolMessage,
    UserMessage,
    UserPart,
    VideoPart,
)
from serve_app.http.requests.response_request import (
    RESPONSE_FIELDS,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputImage,
    InputItem,
    InputMessage,
    InputPart,
    NamedFunction,
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
    if wanted.stream_options and not wanted.stream:
        raise RequestError("received stream_options without stream; allowed: with stream true; set it")
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
    for number, item in enumerate(wanted.input):
        _add(said, item, f"input[{number}]")
    return said


def _add(said: list[Message], item: InputItem, place: str) -> None:
    """Adds an item to the messages. A call belongs to the message of the assistant before it."""
    if isinstance(item, InputMessage):
        said.append(_message(item, place))
    elif isinstance(item, FunctionCallOutput):
        said.append(ToolMessage(role="tool", content=_text(item), tool_call_id=item.call_id))
    else:
        last = said[-1] if said else None
        if not isinstance(last, AssistantMessage):
            last = AssistantMessage(role="assistant")
            said.append(last)
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(_call(item))


def _text(item: FunctionCallOutput) -> str:
    return item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)


def _call(item: FunctionCall) -> ToolCallText:
    function = FunctionText(name=item.name, arguments=item.arguments)
    return ToolCallText(id=item.call_id, function=function)


def _message(item: InputMessage, place: str) -> Message:
    if item.role == "user":
        return UserMessage(role="user", content=_user_parts(item.content, place))
    content = _text_parts(item.content, item.role, place)
    if item.role == "assistant":
        return AssistantMessage(role="assistant", content=content)
    texts = content if isinstance(content, str) else [part for part in content if isinstance(part, TextPart)]
    return SystemMessage(role=item.role, content=texts)


def _user_parts(content: str | Sequence[InputPart], place: str) -> str | list[UserPart]:
    if isinstance(content, str):
        return content
    parts: list[UserPart] = []
    for number, part in enumerate(content):
        if isinstance(part, InputImage):
            url = ImageUrl(url=part.image_url, detail=part.detail)
            parts.append(ImagePart(type="image_url", image_url=url))
        elif isinstance(part, VideoPart | AudioPart | InputAudioPart):
            parts.append(part)
        elif isinstance(part, RefusalPart):
            raise _misplaced("user", part, f"{place}.content[{number}]")
        else:
            parts.append(TextPart(type="text", text=part.text))
    return parts


def _text_parts(content: str | Sequence[InputPart], role: str, place: str) -> str | list[AssistantPart]:
    if isinstance(content, str):
        return content
    parts: list[AssistantPart] = []
    for number, part in enumerate(content):
        if isinstance(part, InputImage | VideoPart | AudioPart | InputAudioPart) or (
            isinstance(part, RefusalPart) and role != "assistant"
        ):
            raise _misplaced(role, part, f"{place}.content[{number}]")
        parts.append(part if isinstance(part, RefusalPart) else TextPart(type="text", text=part.text))
    return parts


def _misplaced(role: str, part: InputPart, place: str) -> RequestError:
    return RequestError(
        f"{place}: received {part.type} in a message of the {role}; allowed: texts, media of the user, "
        "refusals of the assistant; move it"
    )
