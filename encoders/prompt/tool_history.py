"""Renders tool calls of a conversation's history, for chat templates with and without support for them.

No answer calls a tool here. But a client that talks to several models sends what others have called, and a
model is to read it. Where a template has no words for it, it is a text as the Hermes and Qwen models have it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds a function that an assistant called. arguments: JSON as it was written. call_id: may be empty."""

    name: str
    arguments: str
    call_id: str = ""


def knows_tools(template: str) -> bool:
    """Reports whether a chat template supports tool calls."""
    return "tool_calls" in template


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


def response_as_text(text: str) -> str:
    """Writes a tool's response as text."""
    return f"<tool_response>\n{text}\n</tool_response>"


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
