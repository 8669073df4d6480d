"""Represents a conversation as chat templates take it: messages of parts, media where they were sent.

Parts keep their order. Media before the text of the first user message give the canonical order
[system][media][question], in which every further question about the same media finds its prefix computed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, groupby, islice
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from epd.encoders.checkpoint import Checkpoint
from epd.encoders.prompt.contents import NO_PLACEHOLDERS, Placeholders, as_texts, roles_of_texts
from epd.encoders.prompt.tool_history import (
    RESPONSE,
    ToolCall,
    calls_as_text,
    definitions_as_text,
    for_template,
    knows_definitions,
    knows_tools,
)
from epd.errors import RequestError, check_question
from epd.types import MediaKind

_ANY_QUESTION = "?"

# Messages of these roles are no turns. "tools": each text defines, as JSON, a tool to be called.
# "template": each text is a JSON object of variables for the chat template.
Role = Literal["tools", "template", "system", "user", "assistant", "tool"]
_NO_TURNS = ("tools", "template")
# What may not be among variables for a template: what is decided here, or read as an option of rendering.
_RESERVED_VARIABLES = frozenset(
    {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
) - {"self", "kwargs"}


@dataclass(frozen=True, slots=True)
class ContentPart:
    """Holds a text, or the place of one image, video or clip of sound. text: empty for media."""

    kind: Literal["text"] | MediaKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind != "text" and self.text:
            raise ValueError(f"only a text has text, got {self}")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """Holds one message. Raises RequestError for an empty one, and for media of the system or the assistant.

    tool_calls: of the assistant.
    tool_call_id: of the call that a tool answers.
    name: of the speaker.
    """

    role: Role
    parts: tuple[ContentPart, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if not self.parts:
            raise RequestError(f"a message of the {self.role} has no content; give it a text")
        if self.role not in ("user", "tool") and self.media_kinds:
            kind = self.media_kinds[0]
            raise RequestError(
                f"a message of the {self.role} contains {'audio' if kind == 'audio' else f'{kind}s'}; "
                "allowed: text; put media into a message of the user, or of a tool"
            )

    @property
    def media_kinds(self) -> tuple[MediaKind, ...]:
        """Lists the kinds of the message's media, in order."""
        return tuple(part.kind for part in self.parts if part.kind != "text")

    @property
    def text(self) -> str:
        """Concatenates all of its texts."""
        return "".join(part.text for part in self.parts)

    @property
    def is_blank(self) -> bool:
        """Reports whether the message has neither a medium nor a visible character."""
        return not self.media_kinds and not self.text.strip()


def text_message(role: Role, text: str) -> ChatMessage:
    """Creates a message of one text."""
    return ChatMessage(role, (ContentPart("text", text),))


def one_turn(kinds: Sequence[MediaKind], question: str) -> tuple[ChatMessage, ...]:
    """Creates the conversation of one question after its media. Raises RequestError if it is empty."""
    check_question(question)
    return (ChatMessage("user", (*(ContentPart(kind) for kind in kinds), ContentPart("text", question))),)


def dialogue(
    kinds: Sequence[MediaKind], question: str, earlier: Sequence[tuple[str, str]] = ()
) -> tuple[ChatMessage, ...]:
    """Creates the conversation of media, questions with their answers, and one more question.

    Raises RequestError if a text is empty.
    """
    first, *others = texts = [*chain.from_iterable(earlier), question]
    for text in texts:
        check_question(text)
    roles: Iterator[Role] = cycle(("assistant", "user"))
    return (*one_turn(kinds, first), *map(text_message, roles, others))


def opening(kinds: Sequence[MediaKind], messages: Sequence[ChatMessage] = ()) -> tuple[ChatMessage, ...]:
    """Creates the conversation that has any question behind the last medium of `messages`.

    Without messages, or without media in them, it has one turn with media of these kinds.
    """
    with_media = [place for place, message in enumerate(messages) if message.media_kinds]
    if not with_media:
        return one_turn(kinds, _ANY_QUESTION)
    last = messages[with_media[-1]]
    stop = 1 + max(place for place, part in enumerate(last.parts) if part.kind != "text")
    parts = (*last.parts[:stop], ContentPart("text", _ANY_QUESTION))
    return (*messages[: with_media[-1]], replace(last, parts=parts))


def media_kinds(messages: Sequence[ChatMessage]) -> tuple[MediaKind, ...]:
    """Lists the kinds of all media in a conversation, in order."""
    return tuple(kind for message in messages for kind in message.media_kinds)


def check_chat(messages: Sequence[ChatMessage]) -> None:
    """Raises RequestError for a conversation without anything to answer."""
    if not any(message.role == "user" for message in messages):
        raise RequestError(f"{len(messages)} messages, none of the user; ask something in a user message")
    last = messages[-1]
    if last.role == "assistant":
        raise RequestError(
            "the last message is the assistant's; allowed: user, system or tool; end with a question"
        )
    if last.is_blank and last.role != "tool":
        raise RequestError("the question is empty; ask something about the media in the last message")


def template_options(variables: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """Returns the message with variables for the chat template, none without any.

    Raises RequestError for names that are no variables of templates.
    """
    reserved = sorted(variables.keys() & _RESERVED_VARIABLES)
    if reserved:
        raise RequestError(
            f"received {reserved[0]} in chat_template_kwargs; allowed: variables of the model's chat "
            "template, such as add_vision_id; leave it out"
        )
    return (text_message("template", json.dumps(variables, ensure_ascii=False)),) if variables else ()


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
    roles = roles_of_texts(template, tuple(tokenizer.special_tokens_map.items()))
    turns = [_for_template(message) for message in messages if message.role not in _NO_TURNS]
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
    turns = [message for message in messages if message.role not in _NO_TURNS]
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
