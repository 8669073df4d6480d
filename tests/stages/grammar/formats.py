"""Grammars of the tests, as the library takes them."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


def schema(value: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides={"whitespace_flexible": False})


SHAPE = schema(
    {
        "type": "object",
        "properties": {"shape": {"enum": ["circle", "square"]}, "count": {"type": "integer"}},
        "required": ["shape", "count"],
        "additionalProperties": False,
    }
)
WORDS = regex("[a-z]{2,9}( [a-z]{2,9}){3,30}")
