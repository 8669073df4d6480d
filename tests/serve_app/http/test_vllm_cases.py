"""What vLLM's tests of chat completions expect, as cases in our own words, asked by the official client.

Read in vLLM's repository, tests/entrypoints/openai/chat_completion: test_video, test_vision, test_chat,
test_chat_error, test_usage_policy, test_logprob_token_ids, test_chat_echo, test_cache_accounting and
test_non_object_body_validation, and of the folder above test_basic and test_models; formats and tools are in
`test_vllm_formats`, texts in `test_vllm_completions`. Its models and media are others, so that texts and
numbers of tokens are not compared with those there. `GAPS` are the cases that fail here;
benchmarks/results/vllm_cases.md has their reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import epd
from tests import ROOT
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.http.vllm_requests import (
    TEXT,
    Client,
    chat_completions,
    content,
    embedded_app,
    official_client,
    refused,
    streamed,
)
from tests.serve_app.real_app import RealApp
from tests.serve_app.server import wait_until

MEDIA = ("image", "wide_image", "video", "tall_video")


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with embedded_app() as running:
        yield running


@pytest.fixture(scope="module")
def create(app: RealApp) -> Iterator[Client]:
    with chat_completions(app) as create:
        yield create


def about(*parts: JSON, text: str = "What is it?") -> JSON:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def part_of(path: Path) -> JSON:
    is_video = path.suffix == ".mp4"
    url = data_url(path, "video/mp4" if is_video else "image/png")
    return video_part(url) if is_video else image_part(url)


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


@pytest.mark.parametrize("name", ["image", "video"])
def test_a_url_may_be_a_text(create: Client, media: dict[str, Path], name: str) -> None:
    """vLLM wants an object."""
    part = part_of(media[name])
    bare = {**part, part["type"]: part[part["type"]]["url"]}
    assert content(create(**about(bare))) == content(create(**about(part)))


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
    assert create(**TEXT).prompt_logprobs is None
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
def test_options_of_streams_change_nothing_without_one(create: Client, value: bool | None) -> None:
    """vLLM refuses them."""
    plain = create(**TEXT)
    assert content(create(**TEXT, stream=False, stream_options={"include_usage": value})) == content(plain)


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


# Routes beside the answers: test_basic, test_models


def test_the_server_names_its_model_and_version(app: RealApp) -> None:
    with official_client(app) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
    assert (model.id, model.root, model.object, model.parent) == ("tiny", "tiny", "model", None)
    assert model.created > 0
    assert model.max_model_len > 0
    assert app.http.get("/version").json() == {"version": epd.__version__}
    assert {app.http.get(path).status_code for path in ("/health", "/ping")} == {200}
    assert app.http.post("/ping").status_code == 200


def test_the_server_counts_the_requests_that_it_works_on(app: RealApp, create: Client) -> None:
    assert app.http.get("/load").json() == {"server_load": 0}
    stream = create(**TEXT, stream=True, max_completion_tokens=300, extra_body={"min_tokens": 300})
    next(iter(stream))
    assert app.http.get("/load").json() == {"server_load": 1}
    stream.close()
    app.wait_until_empty()
    wait_until(lambda: app.http.get("/load").json() == {"server_load": 0})


# Other requests than ours


def test_fields_that_nobody_knows_in_messages_and_parts_are_ignored(create: Client) -> None:
    part = {"type": "text", "text": "What?", "extra_field": "0"}
    assert content(create(messages=[{"role": "user", "content": [part], "extra_field": "0"}])) is not None


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
    "role": {"messages": [{"role": "my-custom-role", "content": "What?"}]},
}


@pytest.mark.parametrize("name", GAPS)
def test_a_gap_is_refused_by_its_name_and_listed(create: Client, name: str) -> None:
    refused(create, name, extra_body=GAPS[name])
    page = (ROOT / "benchmarks" / "results" / "vllm_cases.md").read_text(encoding="utf-8")
    assert f"`{name}`" in page
