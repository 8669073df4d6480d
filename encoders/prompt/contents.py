"""Finds how a chat template takes the content of a message: as a list of parts, or as one text.

Both are tried, for each role: a template that fails on parts, leaves out their text or prints them as Python
or JSON does, and shows a text, wants texts. Media are then the words that the family's own template writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

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


@lru_cache(maxsize=16)
def roles_of_texts(template: str, special_tokens: tuple[tuple[str, Any], ...]) -> frozenset[str]:
    """Returns the roles whose messages the template takes as texts. special_tokens: that it may name."""
    return frozenset(role for role in _AROUND if _wants_text(template, dict(special_tokens), role))


def _wants_text(template: str, special_tokens: Mapping[str, Any], role: str) -> bool:
    """Reports whether a text of this role is shown, and a list of one is not."""
    before, after = _AROUND[role]

    def shows(form: Callable[[str], Any]) -> bool:
        messages = [_message(each, text, form(text)) for each, text in [*before, (role, _PROBE), *after]]
        try:
            rendered, _ = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=True, **special_tokens
            )
        except Exception:  # noqa: BLE001 # a template is a program of others
            return False
        return _PROBE in rendered[0] and not _PRINTED.search(rendered[0])

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
