"""What vLLM's tests of completions expect, as cases in our own words, asked by the official client.

Read in vLLM's repository, tests/entrypoints/openai/completion: test_completion, test_empty_prompt_list and
test_usage_policy. See `test_vllm_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve_app.conftest import JSON
from tests.serve_app.http.vllm_requests import Client, embedded_app, official_client
from tests.serve_app.real_app import RealApp

TEXT: JSON = {"prompt": "What is the capital of France?", "max_tokens": 5}
PARALLEL: JSON = {"prompt": "What is it?", "n": 3, "max_tokens": 50, "temperature": 2, "seed": 42}
PARALLEL["extra_body"] = {"min_tokens": 3}
TOKENS = [1, 1, 1, 1, 1]


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with embedded_app() as running:
        yield running


@pytest.fixture(scope="module")
def create(app: RealApp) -> Iterator[Client]:
    with official_client(app) as client:
        yield lambda **body: client.completions.create(**{"model": "tiny", "temperature": 0.0, **body})


def refused(create: Client, *words: str, **body: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(**{**TEXT, **body})
    assert all(word in caught.value.message for word in words), caught.value.message
    assert create(**TEXT).choices[0].text is not None


def test_a_text_and_tokens_are_continued(create: Client) -> None:
    found = create(**TEXT, extra_body={"min_tokens": 5, "cache_salt": "a cold cache"})
    (choice,) = found.choices
    assert found.id
    assert choice.text
    assert (choice.finish_reason, choice.logprobs, choice.prompt_logprobs) == ("length", None, None)
    assert found.usage.completion_tokens == 5
    assert found.usage.total_tokens == found.usage.prompt_tokens + 5
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    of_tokens = create(prompt=TOKENS, max_tokens=5)
    assert of_tokens.usage.prompt_tokens == len(TOKENS)
    assert of_tokens.choices[0].text is not None


@pytest.mark.parametrize(("number", "counts"), [(0, {1}), (5, {5, 6})])
def test_each_token_has_its_likeliest_ones(create: Client, number: int, counts: set[int]) -> None:
    found = create(prompt=TOKENS, max_tokens=5, logprobs=number).choices[0].logprobs
    assert found.token_logprobs
    assert {len(each) for each in found.top_logprobs} <= counts


@pytest.mark.parametrize(("number", "stream"), [(21, False), (30, True)])
def test_too_many_logprobs_are_refused(create: Client, number: int, stream: bool) -> None:
    refused(create, "20", logprobs=number, stream=stream)


def test_the_end_of_a_stream_comes_with_its_last_text(create: Client) -> None:
    asked = {**TEXT, "extra_body": {"min_tokens": 5}}
    choices = [chunk.choices[0] for chunk in create(**asked, stream=True)]
    assert [each.finish_reason for each in choices if each.finish_reason] == ["length"]
    assert choices[-1].finish_reason == "length"
    assert choices[-1].text
    assert "".join(each.text for each in choices) == create(**asked).choices[0].text


def test_several_answers_differ_and_end_on_their_own(create: Client) -> None:
    choices = create(**PARALLEL, logprobs=0).choices
    assert [each.index for each in choices] == [0, 1, 2]
    assert all(each.finish_reason for each in choices)
    assert len({each.text for each in choices}) == 3
    assert len({len(each.logprobs.tokens) for each in choices}) > 1
    streamed, ends = [""] * 3, 0
    for chunk in create(**PARALLEL, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
        ends += choice.finish_reason is not None
    assert streamed == [each.text for each in choices]
    assert ends == 3


@pytest.mark.parametrize(
    ("options", "is_last", "is_each"),
    [
        ({}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": False}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_usage_is_streamed_as_asked_for(create: Client, options: JSON, is_last: bool, is_each: bool) -> None:
    chunks = list(create(**TEXT, stream=True, stream_options=options))
    with_text = [chunk for chunk in chunks if chunk.choices]
    assert {chunk.usage is not None for chunk in with_text} == {is_each}
    assert with_text[-1].choices[0].finish_reason
    assert len(chunks) - len(with_text) == is_last
    for usage in [chunk.usage for chunk in chunks if chunk.usage]:
        assert min(usage.prompt_tokens, usage.completion_tokens) > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats"])
@pytest.mark.parametrize("value", [None, True])
def test_options_of_streams_change_nothing_without_one(create: Client, name: str, value: bool | None) -> None:
    found = create(**TEXT, stream=False, stream_options={name: value})
    assert found.choices[0].text == create(**TEXT).choices[0].text


@pytest.mark.parametrize("prompt", [TEXT["prompt"], TOKENS], ids=["text", "tokens"])
def test_equal_prompts_have_equal_answers(create: Client, prompt: Any) -> None:
    asked = {"prompt": [prompt] * 2, "max_tokens": 5, "extra_body": {"min_tokens": 5}}
    first, second = create(**asked).choices
    texts = ["", ""]
    for chunk in create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert all(texts)
    assert texts == [first.text, second.text] == [first.text] * 2


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}},
        {"regex": "[.*"},
        {"grammar": 'root ::= select_statementinvalidsyntax\n\nselect_statement ::= "SELECT "'},
    ],
)
def test_a_format_that_is_none_is_refused(create: Client, wanted: JSON) -> None:
    refused(create, extra_body={"structured_outputs": wanted})


def test_a_list_of_prompts_is_not_empty(create: Client) -> None:
    refused(create, "prompt", prompt=[])


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True, "logprobs": 1},
        {"extra_body": {"prompt_logprobs": 1}},
        {"extra_body": {"use_beam_search": True}},
        {"extra_body": {"truncate_prompt_tokens": 4}},
    ],
)
def test_what_is_not_here_is_refused_by_its_name(create: Client, more: JSON) -> None:
    refused(create, next(iter(more.get("extra_body", more))), **more)
