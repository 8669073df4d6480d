"""Represents a conversation: messages of parts, media where they were sent.

Parts keep their order. Media before the text of the first user message give the canonical order
[system][media][question], in which every further question about the same media finds its prefix computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from epd.errors import RequestError, check_question
from epd.types import MediaKind

# Messages of these roles are no turns. "tools": each text defines, as JSON, a tool to be called.
# "template": each text is a JSON object of variables for the chat template.
Role = Literal["tools", "template", "system", "user", "assistant", "tool"]
NO_TURNS = ("tools", "template")
# What may not be among variables for a template: the arguments of transformers' `apply_chat_template`.
RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds a function that an assistant called. arguments: JSON as it was written. call_id: may be empty."""

    name: str
    arguments: str
    call_id: str = ""


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
    reserved = sorted(variables.keys() & RESERVED_VARIABLES)
    if reserved:
        raise RequestError(
            f"received {reserved[0]} in chat_template_kwargs; allowed: variables of the model's chat "
            "template, such as add_vision_id; leave it out"
        )
    return (text_message("template", json.dumps(variables, ensure_ascii=False)),) if variables else ()
