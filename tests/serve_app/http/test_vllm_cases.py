"""What vLLM's tests of chat completions expect, as cases in our own words, asked by the official client.

Read in vLLM's repository, tests/entrypoints/openai/chat_completion: test_video, test_vision, test_chat,
test_chat_error, test_chat_completion, test_chat_logit_bias_validation, test_chat_stop_token_ids_validation,
test_non_object_body_validation, test_completion_with_function_calling, test_tool_choice_null,
test_delta_tool_call_serialization, test_usage_policy, test_logprob_token_ids, test_chat_echo and
test_cache_accounting. Its models and media are others, so that texts and numbers of tokens are not compared
with those there. `GAPS` are the cases that fail here; docs/api.md has them with their reasons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from transformers import AutoConfig

from epd.models import embedded_model_path
from tests import ROOT
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.real_app import RealApp, real_app

Client = Callable[..., Any]
TEXT: JSON = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the opposite of big?"},
    ]
}
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
MEDIA = ("image", "wide_image", "video", "tall_video")


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with real_app(embedded_model_path(), "1e1p1d") as running:
        yield running
        running.wait_until_empty()
        assert running.num_workers_lost == 0


@pytest.fixture(scope="module")
def create(app: RealApp) -> Iterator[Client]:
    """Asks by the official client; fields that it does not know go into extra_body."""
    with (
        httpx.Client(trust_env=False, timeout=60) as http,
        OpenAI(base_url=f"{app.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield lambda **body: client.chat.completions.create(**{"model": "tiny", "temperature": 0, **body})


def about(*parts: JSON, text: str = "What is it?") -> JSON:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def part_of(path: Path) -> JSON:
    is_video = path.suffix == ".mp4"
    url = data_url(path, "video/mp4" if is_video else "image/png")
    return video_part(url) if is_video else image_part(url)


def content(completion: ChatCompletion) -> str:
    found = completion.choices[0].message.content
    assert found is not None
    return found


def streamed(chunks: Any) -> tuple[str, list[str], list[Any]]:
    """Returns the text, the reasons of ends and the deltas of a stream of one choice, which ends it."""
    choices = [chunk.choices[0] for chunk in chunks]
    deltas = [choice.delta for choice in choices]
    assert choices[-1].finish_reason
    assert {delta.role for delta in deltas} <= {"assistant", None}
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    return "".join(delta.content or "" for delta in deltas), reasons, deltas


def refused(create: Client, *words: str, **body: Any) -> None:
    """Checks that a request is a 400 whose message has the words, and that the next one is answered."""
    with pytest.raises(openai.BadRequestError) as caught:
        create(**{**TEXT, **body})
    assert caught.value.status_code == 400
    assert all(word in caught.value.message for word in words), caught.value.message
    assert create(**TEXT, max_completion_tokens=1).choices[0].message.content is not None


# Media: test_video, test_vision


@pytest.mark.parametrize("name", MEDIA)
def test_a_medium_is_answered_and_talked_about(create: Client, media: dict[str, Path], name: str) -> None:
    asked = about(part_of(media[name]))
    length = {"max_completion_tokens": 10, "extra_body": {"ignore_eos": True}}
    completion = create(**asked, **length, logprobs=True, top_logprobs=5)
    assert len(completion.choices) == 1
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 10
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 10
    assert completion.choices[0].message.role == "assistant"
    assert len(completion.choices[0].logprobs.content) == 10
    turns = [
        *asked["messages"],
        {"role": "assistant", "content": content(completion)},
        {"role": "user", "content": "express your result in json"},
    ]
    assert content(create(messages=turns, max_completion_tokens=10)) is not None


@pytest.mark.parametrize("name", MEDIA)
def test_a_stream_about_a_medium_has_the_same_text(create: Client, media: dict[str, Path], name: str) -> None:
    asked = about(part_of(media[name]))
    completion = create(**asked, max_completion_tokens=10)
    text, reasons, deltas = streamed(create(**asked, max_completion_tokens=10, stream=True))
    assert reasons == [completion.choices[0].finish_reason]
    assert reasons == ["stop"] or deltas[-1].content
    assert text == content(completion)


@pytest.mark.parametrize("kind", ["image_url", "video_url"])
def test_a_url_is_an_object(create: Client, kind: str) -> None:
    refused(create, kind, **about({"type": kind, kind: "data:,"}))


def test_fewer_frames_are_fewer_tokens(create: Client, media: dict[str, Path]) -> None:
    asked = about(part_of(media["video"]))
    fewer = create(**asked, extra_body={"media_io_kwargs": {"video": {"num_frames": 2}}})
    assert fewer.usage.prompt_tokens < create(**asked).usage.prompt_tokens


def test_a_wrong_number_of_frames_is_refused(create: Client, media: dict[str, Path]) -> None:
    asked = about(part_of(media["video"]))
    wrong = {"media_io_kwargs": {"video": {"num_frames": "invalid"}}}
    refused(create, "num_frames", **asked, extra_body=wrong)


@pytest.mark.parametrize("names", [MEDIA[:2], MEDIA[2:], MEDIA])
def test_several_media_are_answered(create: Client, media: dict[str, Path], names: tuple[str, ...]) -> None:
    assert content(create(**about(*(part_of(media[name]) for name in names)), max_completion_tokens=10))


@pytest.mark.parametrize("name", ["image", "video"])
def test_more_media_than_the_limit_are_refused(create: Client, media: dict[str, Path], name: str) -> None:
    refused(create, "64", **about(*[part_of(media[name])] * 65))


@pytest.mark.parametrize("name", MEDIA[:2])
def test_text_may_stand_before_an_image(create: Client, media: dict[str, Path], name: str) -> None:
    parts = [{"type": "text", "text": "Describe this image."}, part_of(media[name])]
    messages = [TEXT["messages"][0], {"role": "user", "content": parts}]
    assert content(create(messages=messages, max_completion_tokens=10))


def test_a_medium_that_was_sent_is_asked_about_by_its_uuid(create: Client, media: dict[str, Path]) -> None:
    image = part_of(media["image"]) | {"uuid": "http://an.example/image.png"}
    first = create(**about(image), max_completion_tokens=10)
    again = create(**about(image | {"image_url": {}}), max_completion_tokens=10)
    assert content(again) == content(first)


def test_a_medium_that_was_never_sent_is_refused(create: Client) -> None:
    refused(create, **about({"type": "image_url", "image_url": {}, "uuid": "never sent"}))


# Logprobs: test_chat, test_logprob_token_ids


@pytest.mark.parametrize("number", [None, 0, 5])
def test_logprobs_have_the_requested_alternatives(create: Client, number: int | None) -> None:
    wanted: JSON = {"logprobs": number is not None} | ({} if number is None else {"top_logprobs": number})
    found = create(**TEXT, max_completion_tokens=5, **wanted).choices[0].logprobs
    if number is None:
        assert found is None
    else:
        assert {len(token.top_logprobs) for token in found.content} == {number}
        assert all(one.logprob <= 0 for token in found.content for one in token.top_logprobs)


@pytest.mark.parametrize(("number", "stream"), [(21, True), (30, False)])
def test_too_many_logprobs_are_refused(create: Client, number: int, stream: bool) -> None:
    refused(create, "20", logprobs=True, top_logprobs=number, stream=stream)


def test_prompt_logprobs_are_absent_by_default(create: Client) -> None:
    assert getattr(create(**TEXT), "prompt_logprobs", None) is None
    refused(create, "prompt_logprobs", extra_body={"prompt_logprobs": -1})


# Conversations and streams: test_chat, test_usage_policy


def test_a_conversation_goes_on(create: Client) -> None:
    completion = create(**TEXT, max_completion_tokens=5, extra_body={"ignore_eos": True}, logprobs=True)
    assert completion.id
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.prompt_tokens > 0
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 5
    turns = [*TEXT["messages"], {"role": "assistant", "content": content(completion)}]
    turns.append({"role": "user", "content": "express your result in json"})
    assert content(create(messages=turns, max_completion_tokens=5)) is not None


def test_a_streamed_text_is_the_same_and_its_end_comes_with_the_last_of_it(create: Client) -> None:
    asked = {**TEXT, "max_completion_tokens": 10, "extra_body": {"min_tokens": 10}}
    completion = create(**asked)
    text, reasons, deltas = streamed(create(**asked, stream=True))
    assert text == content(completion)
    assert reasons == [completion.choices[0].finish_reason] == ["length"]
    assert deltas[-1].content


def test_cached_tokens_are_counted(create: Client) -> None:
    asked = {**TEXT, "max_completion_tokens": 5, "extra_body": {"cache_salt": "a cold cache"}}
    assert create(**asked).usage.cache_read_input_tokens == 0
    assert create(**asked).usage.cache_read_input_tokens > 0
    *_, last = create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.cache_read_input_tokens > 0
    assert last.usage.cache_read_input_tokens == last.usage.prompt_tokens_details.cached_tokens


def test_usage_is_streamed_where_it_is_asked_for(create: Client) -> None:
    asked = {**TEXT, "max_completion_tokens": 10, "stream": True}
    assert all(chunk.usage is None for chunk in create(**asked))
    assert all(chunk.usage is None for chunk in create(**asked, stream_options={"include_usage": False}))
    options = {"include_usage": True, "continuous_usage_stats": False}
    *others, last = create(**asked, stream_options=options)
    assert all(chunk.usage is None and chunk.choices for chunk in others)
    assert last.choices == []
    assert last.usage.prompt_tokens > 0
    assert last.usage.completion_tokens > 0
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_usage_so_far_is_streamed_where_it_is_asked_for(create: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**TEXT, "max_completion_tokens": 10, "extra_body": {"ignore_eos": True}}
    chunks = list(create(**asked, stream=True, stream_options=options))
    usages = [chunk.usage for chunk in chunks]
    *counts, total = [usage.completion_tokens for usage in usages]
    assert counts == sorted(set(counts))
    assert counts[0] == 0
    assert counts[-1] == total == 10
    assert all(chunk.choices[0].delta.content is not None for chunk in chunks[:-1])
    assert {usage.prompt_tokens for usage in usages} == {usages[-1].prompt_tokens}
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)


@pytest.mark.parametrize("value", [None, True])
def test_options_of_streams_need_a_stream(create: Client, value: bool | None) -> None:
    refused(create, "stream", stream=False, stream_options={"include_usage": value})


def test_usage_of_a_completion_is_always_there(create: Client) -> None:
    usage = create(**TEXT, max_completion_tokens=5).usage
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens > 0


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_a_seed_has_64_bits(create: Client, seed: int) -> None:
    refused(create, "seed", "than or equal", seed=seed)


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_several_choices_are_numbered(create: Client, n: int) -> None:
    more = {"temperature": 1.5, "seed": 42, "max_completion_tokens": 10, "extra_body": {"min_tokens": 8}}
    completion = create(**TEXT, n=n, **more)
    assert [choice.index for choice in completion.choices] == list(range(n))
    texts = [choice.message.content for choice in completion.choices]
    assert all(texts)
    assert n < 3 or len(set(texts)) > 1


def test_several_choices_are_streamed(create: Client) -> None:
    texts = {0: "", 1: ""}
    for chunk in create(**TEXT, n=2, temperature=0.7, max_completion_tokens=15, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(texts.values())


def test_a_text_may_be_a_list_of_parts(create: Client) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]
    text = [{"role": "user", "content": "What is it?"}]
    assert content(create(messages=parts)) == content(create(messages=text))
    system = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *text]
    assert content(create(messages=system)) is not None


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
    text = held(create, response_format={"type": "json_object"}, frequency_penalty=1, seed=5)
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


# Bodies: test_non_object_body_validation


@pytest.mark.parametrize("body", ["this is not valid json{{{", ["not", "an", "object"], 42, None])
def test_a_body_is_an_object(app: RealApp, body: Any) -> None:
    reply = app.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_invocations_answer_as_the_route_of_the_request(app: RealApp, create: Client) -> None:
    asked = {**TEXT, "model": "tiny", "max_completion_tokens": 5, "temperature": 0.0, "logprobs": False}
    reply = app.http.post("/invocations", json=asked).json()
    completion = create(**asked)
    assert completion.model_dump(exclude_unset=True).keys() == reply.keys()
    assert completion.model_dump()["choices"] == reply["choices"]
    body = {"model": "tiny", "prompt": "What is it?", "max_tokens": 5, "temperature": 0}
    texts = [app.http.post(path, json=body).json() for path in ("/invocations", "/v1/completions")]
    assert texts[0]["object"] == "text_completion"
    assert texts[0]["choices"] == texts[1]["choices"]
    neither = app.http.post("/invocations", json={"model": "tiny", "input": "What is it?"})
    assert neither.status_code == 400
    assert "neither messages nor a prompt" in neither.json()["error"]["message"]
    wrong = app.http.post("/invocations", json={"messages": [], "n": 0}).json()["error"]["message"]
    assert "messages" in wrong
    assert "n: " in wrong


def test_a_salt_is_not_empty(create: Client) -> None:
    refused(create, "cache_salt", extra_body={"cache_salt": ""})


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


# Other requests than ours


GAPS: dict[str, JSON] = {
    "use_beam_search": {"use_beam_search": True, "n": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True},
    "continue_final_message": {"continue_final_message": True},
    "add_generation_prompt": {"add_generation_prompt": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 4},
    "return_token_ids": {"return_token_ids": True},
    "logprob_token_ids": {"logprob_token_ids": [1, 2]},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": -1},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "extra_field": {"messages": [{"role": "user", "content": "What?", "extra_field": "0"}]},
    "role": {"messages": [{"role": "my-custom-role", "content": "What?"}]},
}


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_refused_by_its_name_and_listed(create: Client, name: str) -> None:
    refused(create, name, extra_body=GAPS[name])
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    section = page.partition("## vLLM's own tests")[2].partition("\n## ")[0]
    assert f"`{name}`" in section
