"""Reads which functions a chat request offers, and whether its answer must call one."""

from __future__ import annotations

from typing import Any

from epd.chat import ChatMessage, ContentPart, template_options
from epd.errors import RequestError
from epd.serve_app.http.requests.chat_request import ChatRequest, Tool, ToolChoice
from epd.stages.grammar.formats import AnswerFormat, format_of

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def offers_tools(chat: ChatRequest) -> bool:
    """Returns whether the answer may call a function."""
    return bool(chat.tools) and chat.tool_choice != "none"


def no_turns(chat: ChatRequest) -> tuple[ChatMessage, ...]:
    """Returns the messages that are no turns: variables of the template, offered functions.

    Raises RequestError.
    """
    _check(chat)
    options = template_options(chat.chat_template_kwargs or {})
    if not offers_tools(chat):
        return options
    definitions = [tool.model_dump_json(exclude_none=True) for tool in chat.tools or ()]
    return *options, ChatMessage("tools", tuple(ContentPart("text", each) for each in definitions))


def required_calls(chat: ChatRequest) -> AnswerFormat | None:
    """Returns the format of an answer that must call a function; None for any other. Raises RequestError."""
    choice = chat.tool_choice
    if not offers_tools(chat) or choice in (None, "auto"):
        return None
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in chat.tools or () if tool.function.name == choice.function.name]
    else:
        tools = chat.tools or []
    is_parallel = choice == "required" and chat.parallel_tool_calls is not False
    return format_of("tool_calls", {"tools": list(map(_shape, tools)), "is_parallel": is_parallel})


def _shape(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    return {"name": tool.function.name, "parameters": _NO_ARGUMENTS if parameters is None else parameters}


def _check(chat: ChatRequest) -> None:
    names = [tool.function.name for tool in chat.tools or ()]
    if len(set(names)) < len(names):
        raise RequestError(
            f"received {len(names)} tools of {len(set(names))} names; allowed: one of each name"
        )
    choice = chat.tool_choice
    if choice not in (None, "none") and not names:
        raise RequestError(
            "received tool_choice without tools; allowed: with tools; add them or leave it out"
        )
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise RequestError(
            f"received tool_choice {choice.function.name[:64]!r}; allowed: {', '.join(names)[:300]}; use one"
        )
