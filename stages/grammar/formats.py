"""Writes what a client asks of an answer's format as the text of a grammar.

The text is all that workers need, and all that travels with a request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from epd.errors import RequestError
from epd.stages.grammar.limits import MAX_CHOICES, MAX_DEPTH, MAX_FORMAT_BYTES

Kind = Literal["json_schema", "regex", "choice", "grammar", "tool_calls"]
# Between the parts of a JSON text, where that is wanted: a space or none, or a new line with its indentation.
WHITESPACE = r"(\n|\r\n)?[ \t]{0,16}"
_RULE = "tool_{number}"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Describes the format of an answer.

    text: JSON of a schema, of a list of choices, or of `{"tools": [{"name", "parameters"}], "is_parallel"}`;
    a regular expression; or a grammar in the notation of Lark or GBNF.
    whitespace: an expression of what may stand between the parts of JSON; None: nothing.
    """

    kind: Kind
    text: str
    whitespace: str | None = None


def format_of(kind: Kind, value: Any, whitespace: str | None = None) -> AnswerFormat:
    """Returns the format of a value from a request's JSON. Raises RequestError for what is too large."""
    if _depth(value) > MAX_DEPTH:
        raise RequestError(
            f"received a format with lists and objects more than {MAX_DEPTH} deep in each other; "
            f"allowed: {MAX_DEPTH}; use $ref and $defs"
        )
    if kind == "choice" and len(value) > MAX_CHOICES:
        raise RequestError(f"received {len(value)} choices; allowed: {MAX_CHOICES}; send fewer")
    text = value if isinstance(value, str) else json.dumps(value)
    num_bytes = len(text) + len(whitespace or "")
    if num_bytes > MAX_FORMAT_BYTES:
        raise RequestError(
            f"received a format of {num_bytes} bytes; allowed: {MAX_FORMAT_BYTES}; simplify it"
        )
    return AnswerFormat(kind, text, whitespace)


def _depth(value: Any) -> int:
    """Returns how deep lists and objects lie in each other, without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        if depth > MAX_DEPTH:
            break
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth


def grammar_text(wanted: AnswerFormat) -> str:
    """Returns the grammar of a format. Raises ValueError for one that makes no sense.

    What it costs is bounded by nothing but the format: see `epd.stages.grammar.checker`.
    """

    if wanted.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(wanted.text, overrides=_json_options(wanted.whitespace))
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(wanted.text)
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: {_choices(json.loads(wanted.text))}")
    if wanted.kind == "grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(wanted.text))
    return LLMatcher.grammar_from_lark(_tool_calls(json.loads(wanted.text), wanted.whitespace))


def _json_options(whitespace: str | None) -> Any:
    """Returns options that a schema's own cannot change; what cannot be enforced is an error."""
    return {
        "whitespace_flexible": whitespace is not None,
        "whitespace_pattern": whitespace,
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": False,
        "lenient": False,
    }


def _choices(texts: list[str]) -> str:
    return " | ".join(map(_literal, texts))


def _literal(text: str) -> str:
    """Writes a text for Lark. In ASCII: Lark takes U+007F escaped alone, unlike JSON."""
    return json.dumps(text)


def _tool_calls(wanted: dict[str, Any], whitespace: str | None) -> str:
    """Writes a grammar of one call or more, as the Hermes and Qwen models write them."""
    tools = wanted["tools"]
    rules = [_RULE.format(number=number) for number in range(len(tools))]
    more = ' ("\\n" call)*' if wanted["is_parallel"] else ""
    lines = [
        f"start: call{more}",
        f'call: "<tool_call>\\n" ({" | ".join(rules)}) "}}\\n</tool_call>"',
    ]
    for rule, tool in zip(rules, tools, strict=True):
        head = f'{{"name": {json.dumps(tool["name"])}, "arguments": '
        schema = tool["parameters"] | {"x-guidance": _json_options(whitespace)}
        lines += [
            f"{rule}: {_literal(head)} {rule}_arguments",
            f"{rule}_arguments: %json {json.dumps(schema)}",
        ]
    return "\n".join(lines)
