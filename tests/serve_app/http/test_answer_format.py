"""Formats of answers, in OpenAI's fields and vLLM's, become a grammar of the request, or are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve_app.conftest import JSON, Front

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def grammar_of(front: Front, **more: Any) -> str:
    response = front.ask(**more)
    assert response.status_code == 200, response.text
    return front.service.requests[-1].sampling.grammar


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "json_object"}}, '{"type":"object"'),
        ({"response_format": FORMAT}, '"required":["n"]'),
        ({"structured_outputs": {"json": SCHEMA}}, '"required":["n"]'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '"required":["n"]'),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, 'flexible":false'),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[~]"}}, 'pattern":"[~]"'),
        ({"structured_outputs": {"json_object": True}}, '{"type":"object"'),
        ({"structured_outputs": {"regex": "a+"}}, "start: /a+/"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'start: "yes" | "n\\"o"'),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "start"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, 'start: "x"'),
    ],
)
def test_a_format_becomes_a_grammar(front: Front, more: JSON, words: str) -> None:
    assert words in grammar_of(front, **more)


@pytest.mark.parametrize(
    "more",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"structured_outputs": None}],
)
def test_without_a_format_there_is_no_grammar(front: Front, more: JSON) -> None:
    assert grammar_of(front, **more) == ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "allowed: one of them"),
        ({"response_format": {"type": "json_schema"}}, "json_schema without json_schema"),
        ({"response_format": {**FORMAT, "type": "text"}}, "text with json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "with json and regex"),
        ({"structured_outputs": {"json": "[]"}}, "not JSON of an object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "received ignore_eos with"),
    ],
)
def test_what_cannot_be_followed_is_refused(front: Front, more: JSON, words: str) -> None:
    response = front.ask(**more)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    assert front.service.requests == []
