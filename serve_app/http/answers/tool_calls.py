"""Finds calls of functions in the text of an answer while it grows, as Hermes and Qwen models write them.

    Let me look. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>
    [ content  )             [ head                            )[ arguments    )[ tail         )

Arguments are passed on as they come. What turns out to be no call stays content. Calls with a tag for each
argument are read when they are whole:

    qwen3_coder    <function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>
    glm45          weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>

Both stand between <tool_call> and </tool_call>. What an argument is, the schema of the function says.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from epd.serve_app.http.answers.reasoning import overlap

# The schema of each function's parameters, by its name.
Schemas = Mapping[str, Mapping[str, Any]]
# Name and arguments, as JSON, of what stands between the tags; None for what is no call.
ReadCall = Callable[[str], tuple[str, str] | None]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)
_GLM_NAME = re.compile(r"\s*([^\s<]+)\s*(.*)\Z", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def call_reader(parser: str, schemas: Schemas) -> ReadCall | None:
    """Returns what reads the calls of a parser; None for those of Hermes, which are read while they grow."""
    read = {"qwen3_coder": _qwen, "qwen3_xml": _qwen, "glm45": _glm, "glm47": _glm}.get(parser)
    return None if read is None else lambda body: read(body, schemas)


def _qwen(body: str, schemas: Schemas) -> tuple[str, str] | None:
    found = _FUNCTION.match(body)
    if found is None:
        return None
    pairs = ((key.strip(), _without_breaks(text)) for key, text in _PARAMETER.findall(found[2]))
    return _call(found[1].strip(), pairs, schemas)


def _glm(body: str, schemas: Schemas) -> tuple[str, str] | None:
    found = _GLM_NAME.match(body)
    if found is None:
        return None
    pairs = ((key.strip(), text) for key, text in _GLM_ARGUMENT.findall(found[2]))
    return _call(found[1], pairs, schemas)


def _without_breaks(text: str) -> str:
    """Returns a text without the line breaks that the tags put around it."""
    return text.removeprefix("\n").removesuffix("\n")


def _call(name: str, pairs: Iterable[tuple[str, str]], schemas: Schemas) -> tuple[str, str]:
    whole = schemas.get(name, {})
    known = whole.get("properties")
    properties = known if isinstance(known, dict) else {}
    arguments = {key: _value(text, _kinds(properties.get(key), whole)) for key, text in pairs}
    return name, json.dumps(arguments, ensure_ascii=False)


def _value(text: str, kinds: set[str]) -> Any:
    """Returns an argument: a text where its schema wants one or names no type, else JSON or a literal."""
    if not kinds or kinds == {"string"}:
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        is_text_wanted = "string" in kinds and not isinstance(value, str | type(None))
        return text if is_text_wanted and not _is_wanted(value, kinds) else value
    return text


def _is_wanted(value: Any, kinds: set[str]) -> bool:
    """Reports whether a schema that allows texts allows this value too."""
    kind = _kind_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _kind_of(value: Any) -> str | None:
    """Returns the name that schemas have for the type of a value; None for one that JSON has not."""
    named = {
        str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
    }  # fmt: skip
    return named.get(type(value))


def _kinds(schema: Any, whole: Mapping[str, Any]) -> set[str]:
    """Returns the types that a schema names, also those of its alternatives and of what it refers to.

    whole: the schema that has the definitions
    """
    kinds, followed, waiting = set[str](), set[str](), [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        named = each.get("type")
        values = [*_listed(each.get("enum")), *([each["const"]] if "const" in each else [])]
        said = [named, *_listed(named)] if named else map(_kind_of, values)
        kinds.update(kind for kind in said if isinstance(kind, str))
        for word in ("anyOf", "oneOf", "allOf"):
            waiting += _listed(each.get(word))
        reference = each.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_referred(whole, reference))
    return kinds


def _listed(value: Any) -> list[Any]:
    """Returns a list of a schema; nothing for what should be one and is not."""
    return value if isinstance(value, list) else []


def _referred(whole: Mapping[str, Any], reference: str) -> Any:
    """Returns what a reference such as #/$defs/Place names within a schema; None for nothing."""
    root, *keys = reference.split("/")
    found: Any = whole if root == "#" else None
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


_BEGIN, _END = "<tool_call>", "</tool_call>"
# A name with escapes is read with its whole call.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD_CHARS = 1024


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next piece of a call. index: of the call in its answer. name: in its first piece alone."""

    index: int
    name: str | None
    arguments: str


Piece = str | CallPiece


class ToolCallReader:
    """Reads one answer, piece by piece."""

    def __init__(self, read: ReadCall | None = None) -> None:
        """Takes read: what reads a whole call; None for calls of Hermes, which are read as they grow."""
        self._read = read
        self.num_calls = 0
        self._held = ""
        self._state: Literal["content", "head", "arguments", "tail"] = "content"
        self._depth = 0
        self._is_quoted = self._is_escaped = False

    def push(self, text: str) -> list[Piece]:
        """Takes the next text; returns what is certain by now: content, and pieces of calls."""
        self._held += text
        pieces: list[Piece] = []
        while True:
            state = self._state
            pieces += {
                "content": self._content,
                "head": self._head,
                "arguments": self._arguments,
                "tail": self._tail,
            }[state]()
            if self._state == state:
                return pieces

    def finish(self) -> list[Piece]:
        """Returns the rest of an answer that has ended: a call that was cut before its name is content."""
        held, self._held = self._held, ""
        if self._state == "head":
            return [_BEGIN + held]
        is_content = self._state == "content" and (held.strip() or not self.num_calls)
        return [held] if held and is_content else []

    def _content(self) -> Iterator[Piece]:
        before, mark, rest = self._held.partition(_BEGIN)
        if mark:
            self._held, self._state = rest, "head"
        else:
            num_certain = len(before) - overlap(before, _BEGIN)
            before, self._held = before[:num_certain], before[num_certain:]
        if not before.strip() and self.num_calls:  # between calls
            self._held = self._held if mark else before + self._held
        elif before:
            yield before

    def _head(self) -> Iterator[Piece]:
        found = None if self._read else _HEAD.match(self._held[:_MAX_HEAD_CHARS])
        if found:
            self._held, self._state = self._held[found.end() :], "arguments"
            self._depth, self._is_quoted, self._is_escaped = 0, False, False
            yield self._begun(found[1])
        elif _END in self._held:
            body, _, self._held = self._held.partition(_END)
            self._state = "content"
            call = (self._read or _parsed)(body)
            yield self._begun(*call) if call else _BEGIN + body + _END

    def _begun(self, name: str, arguments: str = "") -> CallPiece:
        self.num_calls += 1
        return CallPiece(self.num_calls - 1, name, arguments)

    def _arguments(self) -> Iterator[Piece]:
        stop = next((at for at, char in enumerate(self._held, 1) if self._closes(char)), 0)
        taken = self._held[: stop or len(self._held)]
        self._held = self._held[len(taken) :]
        if stop:
            self._state = "tail"
        if taken:
            yield CallPiece(self.num_calls - 1, None, taken)

    def _closes(self, char: str) -> bool:
        """Takes a character of the arguments; returns whether they end with it."""
        if self._is_quoted:
            self._is_quoted = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            return False
        self._is_quoted = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        return self._depth == 0

    def _tail(self) -> Iterator[Piece]:
        _, mark, rest = self._held.partition(_END)
        if mark:
            self._state = "content"
        self._held = rest if mark else self._held[-len(_END) :]
        yield from ()


def _parsed(body: str) -> tuple[str, str] | None:
    """Returns name and arguments of a call in any other order; None for what is none."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters")) or {}
    called = call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments)
    return called if all(map(_is_unicode, called)) else None


def _is_unicode(text: str) -> bool:
    """Reports whether a text has no half of a pair of surrogates, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= each <= "\udfff" for each in text)
