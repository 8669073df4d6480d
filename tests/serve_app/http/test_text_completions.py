"""`/v1/completions`: prompts without a template, and which of its fields are done, harmless or refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from epd.control.request_budget import RequestLimits
from epd.errors import OverloadedError, RequestError
from epd.sampling_params import SamplingParams
from epd.serve_app.http.requests.completion_request import COMPLETION_FIELDS, CompletionRequest
from epd.serve_app.http.server_state import NUM_AT_ONCE
from tests.request_fields_page import COMPLETIONS
from tests.serve_app.conftest import ADMIN, JSON, Front
from tests.serve_app.fakes import USAGE, WORDS, FakePrompts, FakeService
from tests.serve_app.server import wait_until

PATH = "/v1/completions"
TEXT = "".join(WORDS)


def ask(front: Front, **body: Any) -> httpx.Response:
    return front.http.post(PATH, json={"prompt": "abc", **body})


def refusal(front: Front, **body: Any) -> str:
    """The message of a 400, of which no worker hears."""
    response = ask(front, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert front.service.requests == []
    return str(error["message"])


def chunks(front: Front, **body: Any) -> list[JSON]:
    response = ask(front, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_the_official_client_gets_a_completion(front: Front) -> None:
    found = front.openai.completions.create(model="shapes-vl", prompt="abc")
    assert (found.object, found.choices[0].text, found.choices[0].finish_reason) == (
        "text_completion",
        TEXT,
        "stop",
    )
    assert found.id.startswith("cmpl-")
    assert found.usage is not None
    assert found.usage.total_tokens == USAGE.prompt_tokens + USAGE.completion_tokens
    (request,) = front.service.requests
    assert (request.messages, request.media) == ((), ())
    assert request.prompt == (0, *map(ord, "abc")), "with the tokens that the tokenizer adds"
    assert request.sampling == SamplingParams(max_tokens=16)


def test_options_are_those_of_a_chat(front: Front) -> None:
    options: JSON = {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 7,
        "stop": ["x"], "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [9], "include_stop_str_in_output": True,
        "logit_bias": {"5": -1.0}, "bad_words": ["red", "two"], "n": 2, "priority": 3,
        "cache_salt": "s", "max_tokens": 40,
    }  # fmt: skip
    assert ask(front, **options).status_code == 200
    assert front.ask(**options).status_code == 200
    ours, chat = front.service.requests
    assert ours.sampling == chat.sampling
    assert (ours.priority, ours.cache_salt) == (chat.priority, chat.cache_salt) == (3, "s")
    assert ask(front, max_tokens=None).status_code == 200
    assert front.service.requests[-1].sampling.max_tokens is None
    assert ask(front, model="none").status_code == 404
    assert ask(front, priority=-1).status_code == 403
    assert front.http.post(PATH, json={"prompt": "a", "priority": -1}, headers=ADMIN).status_code == 200


def test_an_expression_holds_the_answer_as_a_chats(front: Front) -> None:
    assert ask(front, structured_outputs={"regex": "a+"}).status_code == 200
    assert front.ask(structured_outputs={"regex": "a+"}).status_code == 200
    ours, chat = front.service.requests
    assert ours.sampling.grammar == chat.sampling.grammar != ""


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(0, 97, 98)]),
        (["a", "b"], [(0, 97), (0, 98)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7], [8]], [(5,), (6, 7), (8,)]),
    ],
)
def test_prompts_of_every_kind(front: Front, prompt: object, tokens: list[tuple[int, ...]]) -> None:
    reply = ask(front, prompt=prompt, n=2).json()
    assert [request.prompt for request in front.service.requests] == tokens
    assert len({request.request_id for request in front.service.requests}) == len(tokens)
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(tokens)))
    assert {choice["text"] for choice in reply["choices"]} == {TEXT}
    assert reply["usage"]["prompt_tokens"] == USAGE.prompt_tokens * len(tokens)


def test_special_tokens_can_be_left_out(front: Front) -> None:
    assert ask(front, add_special_tokens=False).status_code == 200
    assert front.service.requests[0].prompt == tuple(map(ord, "abc"))


def test_a_stream_adds_up_to_the_whole(front: Front) -> None:
    options: JSON = {"prompt": ["a", "b"], "n": 2, "echo": True, "stream_options": {"include_usage": True}}
    whole = ask(front, **{name: options[name] for name in ("prompt", "n", "echo")}).json()
    streamed = chunks(front, **options)
    for choice in whole["choices"]:
        mine = [one for each in streamed for one in each["choices"] if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
    assert [each["usage"] for each in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert (streamed[-1]["choices"], streamed[-1]["usage"]) == ([], whole["usage"])
    assert all("usage" not in each for each in chunks(front))


def test_tokens_so_far_are_in_every_chunk(front: Front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [each["usage"] for each in chunks(front, prompt=["ab", "c"], stream_options=options)]
    assert [usage["completion_tokens"] for usage in usages[:-1]] == list(range(1, 2 * len(WORDS) + 1))
    assert {usage["prompt_tokens"] for usage in usages[:-1]} == {5}
    assert usages[-1]["completion_tokens"] == 2 * USAGE.completion_tokens


def test_echo_comes_before_the_answer(front: Front) -> None:
    assert ask(front, echo=True).json()["choices"][0]["text"] == "abc" + TEXT
    assert ask(front, prompt=[97, 98], echo=True).json()["choices"][0]["text"] == "ab" + TEXT


def test_echo_alone_asks_no_worker(front: Front) -> None:
    reply = ask(front, prompt=["abc", "d"], echo=True, max_tokens=0).json()
    assert [choice["text"] for choice in reply["choices"]] == ["abc", "d"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 2
    assert reply["usage"]["completion_tokens"] == 0
    streamed = chunks(front, echo=True, max_tokens=0)
    assert "".join(one["text"] for each in streamed for one in each["choices"]) == "abc"
    assert front.service.requests == []


def test_logprobs_have_the_form_of_completions(front: Front) -> None:
    found = front.openai.completions.create(model="shapes-vl", prompt="a", logprobs=2).choices[0].logprobs
    assert found is not None
    assert found.tokens == list(WORDS)
    assert found.token_logprobs == [-0.25] * len(WORDS)
    assert found.text_offset == [0, 2, 6, 12]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {WORDS[0]: -0.25, "t0": -1.0, "t1": -2.0}
    streamed = [one["logprobs"] for each in chunks(front, logprobs=2) for one in each["choices"]]
    assert [offset for each in streamed for offset in each["text_offset"]] == found.text_offset
    assert [token for each in streamed for token in each["tokens"]] == found.tokens
    assert ask(front, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"][0] == {WORDS[0]: -0.25}


def test_few_prompts_are_answered_at_a_time(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(word_s=0.05))
    assert ask(front, prompt=["a"] * 40, stream=True).text.endswith("data: [DONE]\n\n")
    assert front.service.most_open == NUM_AT_ONCE
    assert len(front.service.requests) == 40


def test_a_client_that_leaves_ends_all_answers(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(holds_after=1))
    with front.http.stream("POST", PATH, json={"prompt": ["a"] * 40, "stream": True}) as response:
        next(response.iter_lines())
    front.wait_until_empty()
    assert len(front.service.requests) == NUM_AT_ONCE


def test_an_error_of_one_prompt_ends_all(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(error=OverloadedError("busy", 2.0)))
    response = ask(front, prompt=["a", "b"])
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    late = run_front(FakeService(error=OverloadedError("busy", 2.0), words_before_error=2))
    stream = late.openai.completions.create(model="shapes-vl", prompt=["a", "b"], stream=True)
    with pytest.raises(openai.APIError, match="busy"):
        list(stream)
    unfinished = run_front(FakeService(has_end=False))
    assert ask(unfinished).status_code == 500


def test_a_key_and_a_host_are_checked_as_of_chats(run_front: Callable[..., Front]) -> None:
    front = run_front(api_key="the key", allowed_hosts=frozenset({"localhost"}))
    assert ask(front).status_code == 401
    body, right = {"prompt": "a"}, {"authorization": "Bearer the key"}
    assert front.http.post(PATH, json=body, headers=right).status_code == 200
    foreign = front.http.post(PATH, json=body, headers={**right, "host": "evil.example"})
    assert foreign.json()["error"]["code"] == "host_forbidden"
    counted = 'epd_requests_total{status="200",stream="false"} 1.0'
    wait_until(lambda: counted in front.http.get("/metrics").text)


HOSTILE: dict[str, tuple[Any, str]] = {
    "no prompts": ([], "a list of strings"),
    "null": (None, "a list of strings"),
    "a number": (3, "a list of strings"),
    "an object": ({"a": 1}, "a list of strings"),
    "a bool as a token": ([True], "a list of strings"),
    "a bool behind a token": ([1, True], "prompt[1]"),
    "an empty list": ([[]], "prompt[0]"),
    "nested lists": ([[[1]]], "prompt[0][0]"),
    "deep lists": (json.loads("[" * 50 + "]" * 50), "prompt[0]"),
    "a text among tokens": ([1, "a"], "prompt[1]"),
    "a token among texts": (["a", 1], "prompt[1]"),
    "a negative token": ([[1], [-1]], "prompt[1][0]"),
    "a huge token": ([10**30], "prompt[0]"),
    "a fraction": ([1, 1.5], "prompt[1]"),
    "many prompts": (["a"] * 100_000, "received 100,000 prompts times n; allowed 1,024 (max_prompts)"),
    "many lists": ([[1]] * 100_000, "received 100,000 prompts times n"),
    "many tokens": ([1] * 100_000, "received 100,000 tokens; allowed: 1 to 4,095"),
    "a long text": ("a" * (3 << 20), "max_text_bytes"),
    "long texts": (["a" * (1 << 20)] * 3, "max_text_bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_prompt_is_refused_by_its_place_and_soon(front: Front, name: str) -> None:
    prompt, words = HOSTILE[name]
    start_s = time.process_time()  # client and server are in this process; the machine may be busy
    message = refusal(front, prompt=prompt)
    assert words in message
    assert len(message) < 400
    assert time.process_time() - start_s < 10, "less than a second"


def test_tokens_outside_the_vocabulary_are_refused_before_any_work(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def text(_: FakePrompts, token_ids: list[int]) -> str:
        if max(token_ids) > 500:
            raise RequestError(f"received the token {max(token_ids)}")
        return ""

    monkeypatch.setattr(FakePrompts, "text", text)
    assert refusal(front, prompt=[[1], [501]]) == "prompt[1]: received the token 501"
    assert refusal(front, prompt=[501]).startswith("prompt: ")


def test_amounts_are_those_of_all_prompts(run_front: Callable[..., Front]) -> None:
    front = run_front(limits=RequestLimits(max_prompts=4, max_answer_tokens=100, max_text_bytes=20))
    assert "received 6 prompts times n; allowed 4" in refusal(front, prompt=["a"] * 3, n=2)
    assert "received 120 tokens of answers" in refusal(front, prompt=["a"] * 3, max_tokens=40)
    assert "max_text_bytes" in refusal(front, prompt=["a" * 11] * 2)
    assert "1 to 4,095" in refusal(front, prompt="", add_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 0}, "received max_tokens 0"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "received echo with logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "end"}, "received suffix; allowed: null or ''"),
        ({"best_of": 2}, "received best_of"),
        ({"messages": []}, "received the field 'messages'"),
        ({"tools": []}, "received the field 'tools'"),
        ({"promt": "x"}, "did you mean prompt?"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_what_cannot_be_done_is_named(front: Front, body: JSON, words: str) -> None:
    assert words in refusal(front, **body)


def nothing_asked() -> Iterator[tuple[str, Any]]:
    for name, values in COMPLETION_FIELDS.refused.items():
        yield from ((name, value) for value in (None, *values))


@pytest.mark.parametrize(("name", "value"), list(nothing_asked()), ids=str)
def test_a_value_that_asks_for_nothing_is_taken(front: Front, name: str, value: object) -> None:
    assert ask(front, **{name: value}).status_code == 200


@pytest.mark.parametrize("name", COMPLETION_FIELDS.no_effect)
def test_harmless_fields_are_taken(front: Front, name: str) -> None:
    assert ask(front, **{name: "anything"}).status_code == 200


@pytest.mark.parametrize("name", COMPLETION_FIELDS.refused)
def test_every_field_that_is_not_done_is_refused_by_name(front: Front, name: str) -> None:
    assert refusal(front, **{name: {"wanted": 1}}).startswith(f"received {name}; allowed: null")


def test_every_field_of_openai_and_vllm_is_known() -> None:
    known = [*CompletionRequest.model_fields, *COMPLETION_FIELDS.no_effect, *COMPLETION_FIELDS.refused]
    assert len(known) == len(set(known))
    assert (COMPLETIONS.openai | COMPLETIONS.vllm) - set(known) == set()
