"""Reads the calls of functions that models write with a tag for each argument, when a call is whole.

    qwen3_coder    <function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>
    glm45          weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>

Both stand between <tool_call> and </tool_call>. What an argument is, the schema of the function says.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
    known = schemas.get(name, {}).get("properties")
    properties = known if isinstance(known, dict) else {}
    arguments = {key: _value(text, properties.get(key)) for key, text in pairs}
    return name, json.dumps(arguments, ensure_ascii=False)


def _value(text: str, schema: Any) -> Any:
    """Returns an argument: a text where the schema wants one or says nothing, else JSON or a literal."""
    kinds = _kinds(schema)
    if not kinds or kinds == {"string"}:
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        is_text_wanted = "string" in kinds and not isinstance(value, str | type(None))
        return text if is_text_wanted and not _is_wanted(value, kinds) else value
    return text


def _is_wanted(value: Any, kinds: set[str]) -> bool:
    """Reports whether a schema that allows texts allows this value too."""
    named: Sequence[tuple[type, tuple[str, ...]]] = (
        (bool, ("boolean",)), (int, ("integer", "number")), (float, ("number",)), (list, ("array",)),
        (dict, ("object",)),
    )  # fmt: skip
    return any(type(value) is kind and kinds.intersection(names) for kind, names in named)


def _kinds(schema: Any) -> set[str]:
    """Returns the types that a schema names, also those of its alternatives."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    for each in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _kinds(each)
    values = schema.get("enum")
    return kinds or ({"string"} if isinstance(values, list) and all(map(_is_text, values)) else kinds)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
