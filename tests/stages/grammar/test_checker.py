"""Formats are built in a bounded process: hostile ones are refused in seconds, and nothing else stops.

Modules: `stages/grammar/formats.py`, `stages/grammar/limits.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from epd.errors import RequestError
from epd.stages.grammar.checker import GrammarChecker
from epd.stages.grammar.formats import Kind, format_of
from epd.stages.grammar.limits import MAX_CHOICES, MAX_DEPTH


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


FINE: list[tuple[Kind, Any]] = [
    ("json_schema", {"type": "object"}),
    ("json_schema", {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
    ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}}),
    ("json_schema", {"type": "array", "items": {"type": "string"}, "minItems": 10**9}),
    ("json_schema", nested(MAX_DEPTH - 1)),
    ("regex", "(a+)+b"),
    ("regex", "(a{1,100}|é){1,1000000000}"),
    ("choice", ["yes", "no", '"/\\n', "漢🙂"]),
    ("choice", list(map(chr, range(256)))),
    ("grammar", 'root ::= "a" | [0-9]+'),
    ("grammar", 'start: "(" start? ")"'),
    ("tool_calls", {"tools": [{"name": 'a"b', "parameters": {"type": "object"}}], "is_parallel": True}),
]
HOSTILE: dict[str, tuple[Kind, Any, str]] = {
    "a divisor of eight digits": ("json_schema", {"type": "integer", "multipleOf": 99999989}, "needs more"),
    "9,000 optional properties": (
        "json_schema",
        {"properties": {f"p{i}": {} for i in range(9000)}},
        "more than",
    ),
    "deep": ("json_schema", nested(MAX_DEPTH + 1), "lists and objects more than 60 deep"),
    "very deep": ("json_schema", nested(900), "lists and objects more than 60 deep"),
    "an endless reference": ("json_schema", {"$ref": "#"}, "cannot be followed"),
    "references in a circle": (
        "json_schema",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "cannot be followed",
    ),
    "a reference to the network": ("json_schema", {"$ref": "http://localhost/x"}, "does not fetch"),
    "a huge enumeration": ("json_schema", {"enum": list(range(100_000))}, "bytes; allowed: 131072"),
    "many choices": ("choice", ["x"] * (MAX_CHOICES + 1), "4097 choices; allowed: 4096"),
    "a keyword that nobody enforces": ("json_schema", {"not": {}}, 'Unimplemented keys: ["not"]'),
    "its own option": ("json_schema", {"not": {}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
    "no type": ("json_schema", {"type": 1}, "cannot be followed"),
    "alternatives of all combinations": (
        "json_schema",
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for i in range(10)]} for j in range(8)]},
        "cannot be followed",
    ),
    "repetitions of repetitions": ("regex", "((a{1,1000}){1,1000}){1,1000}", "cannot be followed"),
    "nested groups": ("regex", "(" * 60_000 + "a" + ")" * 60_000, "cannot be followed"),
    "half a character": ("regex", "a\ud800", "cannot be followed"),
    "many symbols": ("grammar", "root ::= " + '"a" ' * 30_000, "cannot be followed"),
    "nested rules": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
    "nested rules of GBNF": ("grammar", "root ::= " + "(" * 20_000, "RecursionError"),
    "no grammar": ("grammar", "hello", "cannot be followed"),
}


@pytest.mark.parametrize(("kind", "value"), FINE, ids=range(len(FINE)))
def test_a_format_that_can_be_followed_is_built(checker: GrammarChecker, kind: Kind, value: Any) -> None:
    assert checker.grammar_of(format_of(kind, value))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_format_is_refused_in_seconds(checker: GrammarChecker, name: str) -> None:
    kind, value, words = HOSTILE[name]
    start_s = time.monotonic()
    with pytest.raises(RequestError, match=r"received .*allowed: .*; (simplify|send|use)") as refused:
        checker.grammar_of(format_of(kind, value))
    assert words in str(refused.value)
    assert len(str(refused.value)) < 600
    assert time.monotonic() - start_s < 60, "about 2 s where nothing else runs; a child has 20 times that"


def test_a_verdict_is_kept(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = format_of("regex", "kept"), format_of("regex", "(kept")
    kept = checker.grammar_of(good)
    with pytest.raises(RequestError):
        checker.grammar_of(bad)
    monkeypatch.setattr(checker, "_ask", None)
    assert checker.grammar_of(good) == kept
    with pytest.raises(RequestError):
        checker.grammar_of(bad)


def test_a_child_that_the_system_has_ended_costs_no_request() -> None:
    checker = GrammarChecker()
    try:
        checker.grammar_of(format_of("regex", "a"))
        os.kill(checker._idle[0]._process.pid, signal.SIGKILL)
        assert checker.grammar_of(format_of("regex", "b"))
    finally:
        checker.close()
    assert not checker._idle


def test_a_format_that_ends_its_child_leaves_the_next_one_a_child() -> None:
    """Who asks it waits for the start of another, and not who asks next."""
    checker, slow = GrammarChecker(), {"type": "integer", "multipleOf": 99_999_989}
    try:
        checker.grammar_of(format_of("regex", "a"))
        first = checker._idle[0]._process.pid
        with pytest.raises(RequestError, match="needs more than"):
            checker.grammar_of(format_of("json_schema", slow))
        (child,) = checker._idle
        assert child._process.pid != first
        assert checker.grammar_of(format_of("regex", "b"))
        assert checker._idle == [child]
    finally:
        checker.close()
