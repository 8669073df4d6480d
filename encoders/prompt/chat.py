"""Renders a conversation by a chat template, with and without support for tools.

Where a template has no words for tools and calls, they are texts as the Hermes and Qwen models have them.
Contents are lists of parts or one text. Both are tried, for each role: a template that fails on parts, leaves
out their text or prints them as Python or JSON does, and shows a text, wants texts. Media are then the words
that the family's own template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, count, groupby, islice
from typing import Any

from epd.chat import NO_TURNS, ChatMessage, ContentPart, ToolCall, check_chat, media_kinds, text_message
from epd.encoders.checkpoint import Checkpoint, knows_definitions
from epd.errors import RequestError
from epd.types import MediaKind

# What stands in a prompt for a medium, of each kind. {number}: counts the media of the kind.
Placeholders = Mapping[MediaKind, str]
NO_PLACEHOLDERS: Placeholders = {}

_PROBE = "probe of a text"
_PRINTED = re.compile(rf"""["']text["']\\?["']?\s*:\s*["']{_PROBE}""")
_CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}
_ASK = ("user", "x")
# The messages before and after the one that is tried, by its role: (role, content).
_AROUND: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "system": ([], [_ASK]),
    "user": ([], []),
    "assistant": ([_ASK], [_ASK]),
    "tool": ([_ASK, ("assistant", "")], []),
}
# What stands around a tool's response where it is a text.
RESPONSE = ("<tool_response>\n", "\n</tool_response>")


@lru_cache(maxsize=16)
def roles_of_texts(tokenizer: Any, template: str) -> frozenset[str]:
    """Returns the roles whose messages the template takes as texts. tokenizer: renders it."""
    return frozenset(role for role in _AROUND if _wants_text(tokenizer, template, role))


def _wants_text(tokenizer: Any, template: str, role: str) -> bool:
    """Reports whether a text of this role is shown, and a list of one is not."""
    before, after = _AROUND[role]

    def shows(form: Callable[[str], Any]) -> bool:
        messages = [_message(each, text, form(text)) for each, text in [*before, (role, _PROBE), *after]]
        try:
            rendered = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # noqa: BLE001 # a template is a program of others
            return False
        return _PROBE in rendered and not _PRINTED.search(rendered)

    return shows(str) and not shows(lambda text: [{"type": "text", "text": text}])


def _message(role: str, text: str, content: Any) -> dict[str, Any]:
    """Returns a message; one of the assistant without a text calls the tool that answers next."""
    calls = {"tool_calls": [_CALL]} if role == "assistant" and not text else {}
    return {"role": role, "content": content, **calls}


def as_texts(
    messages: Sequence[dict[str, Any]], roles: frozenset[str], placeholders: Placeholders
) -> list[dict[str, Any]]:
    """Returns messages with the contents of these roles as texts: placeholders and words, in their order."""
    numbers = {kind: count(1) for kind in placeholders}

    def text_of(part: Mapping[str, Any]) -> str:
        kind = part["type"]
        if kind == "text":
            return str(part["text"])
        return placeholders[kind].replace("{number}", str(next(numbers[kind])))

    return [
        {**each, "content": "".join(map(text_of, each["content"]))} if each["role"] in roles else each
        for each in messages
    ]


def render_chat(
    checkpoint: Checkpoint,
    template: str,
    messages: Sequence[ChatMessage],
    reserved: Sequence[str],
    placeholders: Placeholders = NO_PLACEHOLDERS,
) -> str:
    """Renders the prompt as text, by a chat template, up to where the answer begins.

    reserved: strings that represent media, which no text may contain.
    placeholders: what the family's own template writes for media, for one that wants texts.
    Raises RequestError for those, as `check_chat` does, and where the template refuses the messages.
    """
    check_chat(messages)
    definitions = _definitions(messages)
    if definitions and template == checkpoint.chat_template:
        template = checkpoint.tool_template
    if not knows_tools(template):
        messages = without_tools(messages)
    if not knows_definitions(template):
        messages = _with_tools_as_text(messages)
    for message in messages:
        _check_unreserved(message, reserved)
    tokenizer = checkpoint.tokenizer
    roles = roles_of_texts(tokenizer, template)
    turns = [_for_template(message) for message in messages if message.role not in NO_TURNS]
    try:
        text: str = tokenizer.apply_chat_template(
            as_texts(turns, roles, placeholders),
            tools=[json.loads(definition) for definition in definitions] or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            **_variables(messages),
        )
    except Exception as error:  # a template is a program of others
        said = ", ".join(message.role for message in messages)
        raise RequestError(
            f"the model's chat template refuses messages of {said} ({' '.join(str(error).split())[:200]}); "
            "send them in another order"
        ) from error
    return text


def _definitions(messages: Sequence[ChatMessage]) -> list[str]:
    return [part.text for message in messages if message.role == "tools" for part in message.parts]


def _variables(messages: Sequence[ChatMessage]) -> dict[str, Any]:
    given = (part.text for message in messages if message.role == "template" for part in message.parts)
    return {name: value for each in given for name, value in json.loads(each).items()}


def _with_tools_as_text(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Adds the tools to the message of the system, or as one where there is none."""
    definitions = _definitions(messages)
    if not definitions:
        return messages
    others = [message for message in messages if message.role == "template"]
    turns = [message for message in messages if message.role not in NO_TURNS]
    text = definitions_as_text(definitions)
    if turns[0].role != "system":
        return *others, text_message("system", text), *turns
    first = replace(turns[0], parts=(*turns[0].parts, ContentPart("text", f"\n\n{text}")))
    return *others, first, *turns[1:]


def without_tools(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Rewrites tool calls as texts of the assistant, and tool responses as messages of the user.

    Messages of tools that follow each other become one.
    """
    said: list[ChatMessage] = []
    for is_tool, run in groupby(messages, key=lambda message: message.role == "tool"):
        if is_tool:
            said.append(ChatMessage("user", _responses(run)))
        else:
            said += [_with_calls_as_text(message) for message in run]
    return tuple(said)


def _responses(run: Iterable[ChatMessage]) -> tuple[ContentPart, ...]:
    """Returns what tools said, and their media, as parts of one message."""
    begin, end = (ContentPart("text", mark) for mark in RESPONSE)
    new_line = ContentPart("text", "\n")
    parts = chain.from_iterable((new_line, begin, *message.parts, end) for message in run)
    joined: list[ContentPart] = []
    for is_text, several in groupby(islice(parts, 1, None), key=lambda part: part.kind == "text"):
        if is_text:
            joined.append(ContentPart("text", "".join(part.text for part in several)))
        else:
            joined += several
    return tuple(joined)


def _with_calls_as_text(message: ChatMessage) -> ChatMessage:
    if not message.tool_calls:
        return message
    texts = (message.text, calls_as_text(message.tool_calls))
    return text_message(message.role, "\n".join(filter(None, texts)))


def check_media(messages: Sequence[ChatMessage], kinds: Sequence[MediaKind]) -> None:
    """Raises ValueError if the planned media do not match the places in the messages."""
    if media_kinds(messages) != tuple(kinds):
        raise ValueError(
            f"the messages have places for {media_kinds(messages)}, the media are {tuple(kinds)}"
        )


def moved_media(num_placed: int, num_media: int) -> RequestError:
    """Creates the error for a template that drops media, or shows them in an order other than sent."""
    return RequestError(
        f"the model's chat template placed {num_placed} of {num_media} media, or in another order; "
        "send the images of a message before its videos, and those of tools in a message of the user"
    )


def _check_unreserved(message: ChatMessage, reserved: Sequence[str]) -> None:
    called = [text for call in message.tool_calls for text in (call.name, call.arguments, call.call_id)]
    for text in (*(part.text for part in message.parts), *called, message.tool_call_id, message.name):
        for name in reserved:
            if name in text:
                raise RequestError(
                    f"a text of the {message.role} contains {name}, which stands for media; remove it"
                )


def _for_template(message: ChatMessage) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "role": message.role,
        "content": [
            {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind}
            for part in message.parts
        ],
    }
    if message.tool_calls:
        shown["tool_calls"] = [for_template(call) for call in message.tool_calls]
    names = {"tool_call_id": message.tool_call_id, "name": message.name}
    return shown | {name: value for name, value in names.items() if value}


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
