"""What vLLM's tests of formats, tokens by their numbers and tools expect: see `test_vllm_cases`.

Read in vLLM's repository, tests/entrypoints/openai/chat_completion: test_chat, test_chat_completion,
test_chat_error, test_chat_logit_bias_validation, test_chat_stop_token_ids_validation,
test_completion_with_function_calling, test_tool_choice_null and test_delta_tool_call_serialization.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from transformers import AutoConfig

from epd.models import embedded_model_path
from tests.serve_app.conftest import JSON
from tests.serve_app.http.vllm_requests import (
    TEXT,
    Client,
    chat_completions,
    content,
    embedded_app,
    refused,
    streamed,
)
from tests.serve_app.real_app import RealApp

PROFILE: JSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
ADDRESS = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
LANGUAGES = ["Python", "Java", "C++", "Rust"]
WEATHER: JSON = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12, "default": "Vienna"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "options": {"$ref": "#/$defs/Options", "description": "more"},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {
                "Options": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"forecast": {"type": "boolean", "default": False}},
                }
            },
        },
    },
}
BY_NAME = {"type": "function", "function": {"name": "get_current_weather"}}


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with embedded_app() as running:
        yield running


@pytest.fixture(scope="module")
def create(app: RealApp) -> Iterator[Client]:
    with chat_completions(app) as create:
        yield create


# Answers in formats: test_chat, test_chat_completion, test_chat_error


def held(create: Client, **wanted: Any) -> str:
    return content(create(**TEXT, temperature=1, seed=7, max_completion_tokens=400, extra_body=wanted))


def test_a_choice_is_one_of_the_texts(create: Client) -> None:
    wanted = {"structured_outputs": {"choice": LANGUAGES}}
    completion = create(**TEXT, temperature=0.7, logprobs=True, top_logprobs=5, extra_body=wanted)
    assert content(completion) in LANGUAGES
    first = completion.choices[0].logprobs.content[0].top_logprobs
    assert all(one.logprob >= -9999.0 for one in first)


def test_a_document_is_valid_by_its_schema(create: Client) -> None:
    document = json.loads(held(create, structured_outputs={"json": PROFILE}))
    jsonschema.validate(document, PROFILE)
    wanted = {"type": "json_schema", "json_schema": {"name": "profile", "schema": PROFILE}}
    jsonschema.validate(json.loads(held(create, response_format=wanted)), PROFILE)


def test_a_text_matches_its_expression(create: Client) -> None:
    assert re.fullmatch(ADDRESS, held(create, structured_outputs={"regex": ADDRESS}))


def test_an_object_is_json(create: Client) -> None:
    text = held(create, response_format={"type": "json_object"}, frequency_penalty=1, seed=1)
    assert isinstance(json.loads(text), dict)


def test_a_format_of_text_asks_for_nothing(create: Client) -> None:
    assert content(create(**TEXT, response_format={"type": "text"})) == content(create(**TEXT))


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": {"1": "Python", "2": "C++"}},
        {"regex": "[.*"},
        {"json": {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}},
        {"grammar": 'root ::= select_statementinvalidsyntax\n\nselect_statement ::= "SELECT "'},
        {"grammar": ""},
    ],
)
def test_a_format_that_is_none_is_refused(create: Client, wanted: JSON) -> None:
    refused(create, extra_body={"structured_outputs": wanted})


def test_a_schema_is_needed(create: Client) -> None:
    refused(create, "json_schema", response_format={"type": "json_schema"})


# Tokens by their numbers: test_chat_logit_bias_validation, test_chat_stop_token_ids_validation


def vocabulary_size() -> int:
    """Returns how many rows the embeddings have: more than there are tokens."""
    size: int = AutoConfig.from_pretrained(embedded_model_path()).get_text_config().vocab_size
    tokens = json.loads((embedded_model_path() / "tokenizer.json").read_text())
    assert size > 1 + max(token["id"] for token in tokens["added_tokens"])
    return size


def test_the_last_token_may_be_biased_and_stop(create: Client) -> None:
    last = vocabulary_size() - 1
    assert content(create(**TEXT, max_tokens=5, logit_bias={str(last): 1.0})) is not None
    assert content(create(**TEXT, max_tokens=5, extra_body={"stop_token_ids": [last]})) is not None


def test_a_token_that_pads_the_vocabulary_has_no_text(create: Client) -> None:
    last = str(vocabulary_size() - 1)
    completion = create(**TEXT, max_tokens=3, logit_bias={last: 100}, logprobs=True, top_logprobs=1)
    assert content(completion) == ""
    assert [token.token for token in completion.choices[0].logprobs.content] == [""] * 3
    ended = create(**TEXT, max_tokens=3, logit_bias={last: 100}, extra_body={"stop_token_ids": [int(last)]})
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)


def test_tokens_outside_of_the_vocabulary_are_refused(create: Client) -> None:
    size = vocabulary_size()
    words = str(size + 1), f"0 to {size - 1}", str(size)
    refused(create, *words, logit_bias={str(size + 1): 1.0})
    refused(create, *words, extra_body={"stop_token_ids": [size + 1]})
    refused(create, extra_body={"stop_token_ids": [-1]})


@pytest.mark.parametrize("bias", [{"not_a_token_id": 50}, {"1": "not_a_number"}, {"bad1": 50, "bad2": 20}])
def test_a_bias_is_a_number_for_a_token(create: Client, bias: JSON) -> None:
    refused(create, "logit_bias", *(name for name in bias if name != "1"), logit_bias=bias)


# Tools: test_completion_with_function_calling, test_tool_choice_null, test_delta_tool_call_serialization


@pytest.mark.parametrize("choice", ["required", BY_NAME])
def test_a_call_is_valid_and_streamed(create: Client, choice: Any) -> None:
    asked = {**TEXT, "tools": [WEATHER], "tool_choice": choice, "max_completion_tokens": 500}
    asked |= {"temperature": 1, "seed": 3, "parallel_tool_calls": False, "frequency_penalty": 1}
    message = create(**asked).choices[0].message
    assert not message.content
    arguments = message.tool_calls[0].function.arguments
    jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
    text, reasons, deltas = streamed(create(**asked, stream=True))
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert text == ""
    assert len(reasons) == 1
    assert "".join(piece.function.arguments or "" for piece in pieces) == arguments


def test_fields_of_a_piece_that_say_nothing_are_left_out(app: RealApp) -> None:
    body = {**TEXT, "tools": [WEATHER], "tool_choice": "required", "stream": True, "max_tokens": 60}
    lines = app.http.post("/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [
        piece
        for event in events
        for choice in event["choices"]
        for piece in choice["delta"].get("tool_calls", ())
    ]
    assert pieces[0].keys() >= {"id", "type", "index", "function"}
    assert pieces[0]["function"]["name"] == "get_current_weather"
    assert all(piece.keys() == {"index", "function"} for piece in pieces[1:])


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_a_call_without_arguments_may_be_sent_back(create: Client, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": arguments}}
    turns = [
        *TEXT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    assert content(create(messages=turns, max_completion_tokens=20)) is not None


@pytest.mark.parametrize(
    "wanted",
    [
        {"tool_choice": BY_NAME},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "undefined"}}},
        {"tools": [WEATHER], "tool_choice": {}},
        {"tools": [WEATHER], "tool_choice": "bogus"},
        {"tool_choice": "auto"},
    ],
)
def test_a_choice_is_one_of_the_tools(create: Client, wanted: JSON) -> None:
    refused(create, "tool_choice", **wanted)


@pytest.mark.parametrize("choice", ["required", BY_NAME])
def test_a_call_that_is_cut_is_no_call(create: Client, choice: Any) -> None:
    completion = create(**TEXT, tools=[WEATHER], tool_choice=choice, max_completion_tokens=1)
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.tool_calls is None


def test_a_choice_of_null_is_none_given(create: Client) -> None:
    asked = {**TEXT, "max_completion_tokens": 5}
    with_null = create(**asked, tools=[WEATHER], tool_choice=None)
    assert with_null.choices == create(**asked, tools=[WEATHER]).choices
    assert create(**asked, tool_choice=None).choices == create(**asked).choices
    wanted = {"structured_outputs": {"choice": LANGUAGES}}
    assert content(create(**TEXT, tool_choice=None, extra_body=wanted)) in LANGUAGES
    assert create(**asked, tools=[WEATHER], tool_choice="none").choices == create(**asked).choices
