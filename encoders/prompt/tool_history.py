"""Renders tools and the calls of a history, for chat templates with and without support for them.

Where a template has no words for them, they are texts as the Hermes and Qwen models have them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from epd.chat import ToolCall

# What stands around a tool's response where it is a text.
RESPONSE = ("<tool_response>\n", "\n</tool_response>")


def knows_tools(template: str) -> bool:
    """Reports whether a chat template supports tool calls."""
    return "tool_calls" in template


def definitions_as_text(definitions: Sequence[str]) -> str:
    """Writes which tools there are, and how one is called, as text. definitions: JSON of each."""
    tools = "\n".join(definitions)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"Function signatures, one JSON object a line:\n<tools>\n{tools}\n</tools>\n\n"
        "For each function call, write a JSON object with the function's name and its arguments:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def for_template(call: ToolCall) -> dict[str, Any]:
    """Converts a call to the form of transformers' templates: arguments as an object if they are one."""
    function = {"name": call.name, "arguments": _parsed(call.arguments)}
    return {"type": "function", "id": call.call_id, "function": function}


def calls_as_text(calls: Sequence[ToolCall]) -> str:
    """Writes the calls as text, a block of lines for each."""
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n</tool_call>'
        for call in calls
    )


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
