"""Finds the format of an answer and the functions that it may call, in the fields of OpenAI and of vLLM."""

from __future__ import annotations

import json
from typing import Any

from epd.chat import ChatMessage, ContentPart, template_options
from epd.errors import RequestError
from epd.serve_app.http.requests.chat_request import (
    ChatRequest,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
)
from epd.stages.grammar.formats import WHITESPACE, AnswerFormat, format_of

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}


def offers_tools(chat: ChatRequest) -> bool:
    """Returns whether the answer may call a function."""
    return bool(chat.tools) and chat.tool_choice != "none"


def chooses_calls(chat: ChatRequest) -> bool:
    """Returns whether the model chooses to call a function, or not."""
    return offers_tools(chat) and chat.tool_choice in (None, "auto")


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
    if not offers_tools(chat) or chooses_calls(chat):
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


def answer_format(chat: ChatRequest) -> AnswerFormat | None:
    """Returns the wanted format; None for any answer. Raises RequestError where fields disagree."""
    calls = required_calls(chat)
    ours = _of_structured_outputs(chat.structured_outputs) if chat.structured_outputs else None
    theirs = _of_response_format(chat.response_format) if chat.response_format else None
    if ours and theirs:
        raise RequestError(
            "received response_format and structured_outputs; allowed: one of them; leave one out"
        )
    if (ours or theirs) and offers_tools(chat):
        raise RequestError(
            "received tools with another format of the answer; allowed: one of them; set tool_choice to none"
        )
    return calls or ours or theirs


def _of_response_format(wanted: ResponseFormat) -> AnswerFormat | None:
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise RequestError(
            f"received response_format of type {wanted.type} with{'' if wanted.json_schema else 'out'} "
            "json_schema; allowed: a json_schema with the type json_schema alone; change the type"
        )
    if wanted.type == "text":
        return None
    return format_of("json_schema", wanted.json_schema.json_schema if wanted.json_schema else _ANY_OBJECT)


def _of_structured_outputs(wanted: StructuredOutputs) -> AnswerFormat | None:
    formats = {
        "json": wanted.json_schema,
        "json_object": wanted.json_object or None,
        "regex": wanted.regex,
        "choice": wanted.choice,
        "grammar": wanted.grammar,
    }
    given = [name for name, value in formats.items() if value is not None]
    if len(given) > 1:
        raise RequestError(
            f"received structured_outputs with {' and '.join(given)}; allowed: one of {', '.join(formats)}; "
            "leave the others out"
        )
    if wanted.json_schema is not None:
        return format_of("json_schema", _schema(wanted.json_schema), _whitespace(wanted))
    if wanted.json_object:
        return format_of("json_schema", _ANY_OBJECT, _whitespace(wanted))
    if wanted.regex is not None:
        return format_of("regex", wanted.regex)
    if wanted.choice is not None:
        return format_of("choice", wanted.choice)
    return None if wanted.grammar is None else format_of("grammar", wanted.grammar)


def _whitespace(wanted: StructuredOutputs) -> str | None:
    """Returns what may stand between the parts of JSON: nothing, unless it is asked for."""
    if wanted.disable_any_whitespace:
        return None
    is_free = wanted.disable_any_whitespace is False
    return WHITESPACE if is_free and wanted.whitespace_pattern is None else wanted.whitespace_pattern


def _schema(received: dict[str, Any] | str) -> dict[str, Any]:
    if not isinstance(received, str):
        return received
    try:
        schema = json.loads(received)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise RequestError(
            "received structured_outputs.json that is not JSON of an object; allowed: a schema; correct it"
        )
    return schema
