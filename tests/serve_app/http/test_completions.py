"""Chat completions over HTTP: what the official client sees, and what the service is asked."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from epd.chat import media_kinds
from epd.encoders import FrameSampling
from epd.reduction import ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.serve_app.http.answers.responses import logprobs_of
from epd.serve_app.service import TokenLogprob
from tests.serve_app.conftest import JSON, QUESTION, Front
from tests.serve_app.fakes import TIMINGS, USAGE, WORDS, FakeService

TEXT = "".join(WORDS)
ASKED: Any = {"model": "shapes-vl", **QUESTION}


def events(front: Front, **more: Any) -> list[JSON]:
    """The data of all events of a stream; the last must be [DONE]."""
    response = front.ask(stream=True, **more)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_the_official_client_gets_a_completion(front: Front) -> None:
    completion = front.openai.chat.completions.create(**ASKED)

    assert completion.object == "chat.completion"
    assert completion.id == front.service.requests[0].request_id
    assert completion.choices[0].message.content == TEXT
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.total_tokens == USAGE.prompt_tokens + USAGE.completion_tokens
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 16


def test_the_official_client_gets_a_stream(front: Front) -> None:
    stream = front.openai.chat.completions.create(
        **ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    assert next(chunk.choices[0].delta.role for chunk in chunks if chunk.choices) == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(WORDS)
    assert {chunk.id for chunk in chunks} == {front.service.requests[0].request_id}


def test_words_arrive_one_by_one(run_front: Callable[..., Front]) -> None:
    """The first is there while the service is still far from the end."""
    front = run_front(FakeService(holds_after=1))
    with front.openai.chat.completions.create(**ASKED, stream=True) as stream:
        first = next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert front.service.num_closed == 0
    assert first.choices[0].delta.content == WORDS[0]


def test_usage_is_sent_only_if_asked_for(front: Front) -> None:
    without = events(front)
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in without)
    with_usage = events(front, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in with_usage[:-1]] == [None] * (len(with_usage) - 1)
    assert with_usage[-1]["usage"]["prompt_tokens"] == USAGE.prompt_tokens


def test_usage_so_far_is_in_every_event(front: Front) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(front, n=2, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * len(WORDS)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {USAGE.prompt_tokens}
    without = events(front, stream_options=options | {"include_usage": False})
    assert all("usage" not in chunk for chunk in without)


def test_the_report_tells_frames_tokens_and_seconds(front: Front) -> None:
    response = front.ask()
    report = response.json()["epd"]
    assert report["frames"] == USAGE.num_frames
    assert (report["visual_tokens"], report["visual_tokens_before_reduction"]) == (24, 48)
    assert report["retention"] == 0.5
    assert report["stages_s"]["encode"] == TIMINGS.encode_s
    assert "total" not in report["stages_s"]
    assert 0 < report["ttft_s"] <= report["total_s"]
    assert "encode;dur=300.0" in response.headers["server-timing"]
    assert response.headers["x-request-id"] == response.json()["id"]
    last = events(front)[-1]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["epd"]["frames"] == USAGE.num_frames


def test_events_of_stages_come_before_the_words(front: Front) -> None:
    start_s = time.time()
    chunks = events(front, epd={"events": True})
    took_s = time.time() - start_s
    spans = [span for chunk in chunks for span in chunk.get("epd", {}).get("events", [])]
    assert [(span["stage"], span["group"]) for span in spans[:4]] == [
        ("decode_video", 0),
        ("encode", 0),
        ("prefill", 0),
        ("decode_video", 1),
    ]
    assert all(-0.1 < span["start_s"] < span["stop_s"] < took_s + 0.1 for span in spans)
    first_word = next(index for index, chunk in enumerate(chunks) if chunk["choices"])
    assert all(not chunk["choices"] for chunk in chunks[:first_word])
    assert not any(chunk["choices"] == [] for chunk in events(front))


def test_several_choices(front: Front) -> None:
    completion = front.openai.chat.completions.create(**ASKED, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert {choice.message.content for choice in completion.choices} == {TEXT}
    chunks = events(front, n=3)
    for index in range(3):
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
        assert "".join(one["delta"].get("content", "") for one in mine) == TEXT
        assert [one["finish_reason"] for one in mine].count("stop") == 1


def test_logprobs(front: Front) -> None:
    completion = front.openai.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == list(WORDS)
    assert logprobs.content[3].bytes == list(WORDS[3].encode())
    assert [(one.token, one.logprob) for one in logprobs.content[0].top_logprobs] == [("t0", -1), ("t1", -2)]
    streamed = [one["logprobs"] for chunk in events(front, logprobs=True) for one in chunk["choices"]]
    assert [one["content"][0]["token"] for one in streamed if one] == list(WORDS)
    assert completion.choices[0].logprobs is not None
    assert front.ask().json()["choices"][0]["logprobs"] is None


def test_a_token_that_could_not_be_drawn_has_a_number_too() -> None:
    (token,) = logprobs_of([TokenLogprob(5, "x", b"x", -math.inf)]).content or []
    assert json.loads(token.model_dump_json())["logprob"] == -9999


def test_options_reach_the_service(front: Front) -> None:
    said = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": -0.3, "seed": 7, "ignore_eos": True, "min_tokens": 2,
        "include_stop_str_in_output": True, "n": 2,
    }  # fmt: skip
    response = front.ask(
        **said, max_completion_tokens=9, max_tokens=8, stop=["x", "y"], stop_token_ids=[3], logprobs=True,
        logit_bias={"7": 2, "9": -100}, bad_words=["red", "two"],
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert front.service.requests[0].sampling == SamplingParams(
        **said,
        max_tokens=9,
        stop=("x", "y"),
        stop_token_ids=(3,),
        logit_bias=((7, 2.0), (9, -100.0)),
        bad_words=("red", "two"),
        logprobs=0,  # type: ignore[arg-type]
    )
    front.ask(max_tokens=8, stop="z", temperature=0, user="me", metadata={"a": "b"}, bad_words=[])
    assert front.service.requests[1].sampling == SamplingParams(max_tokens=8, stop=("z",), temperature=0)


def test_what_is_not_said_is_as_the_server_has_it(run_front: Callable[..., Front]) -> None:
    front = run_front(default_params=SamplingParams(temperature=0.7, max_tokens=64), default_deadline_s=3.0)
    front.ask(temperature=0.1)
    front.ask(epd={"deadline_s": 1.5})
    first, second = front.service.requests
    assert first.sampling == SamplingParams(temperature=0.1, max_tokens=64)
    assert first.deadline_s == pytest.approx(first.arrival_s + 3, abs=0.5)
    assert second.deadline_s == pytest.approx(second.arrival_s + 1.5, abs=0.5)


@pytest.mark.parametrize(
    ("more", "frame_sampling", "retention_min"),
    [
        ({}, FrameSampling(), None),
        ({"epd": {"fps": 2, "retention_min": 0.5}}, FrameSampling(fps=2.0), 0.5),
        ({"mm_processor_kwargs": {"num_frames": 4}}, FrameSampling(num_frames=4), None),
        ({"epd": {"start_s": 2, "end_s": 4.5}}, FrameSampling(start_s=2.0, end_s=4.5), None),
        ({"epd": {"end_s": 4}, "mm_processor_kwargs": {"fps": 1}}, FrameSampling(fps=1.0, end_s=4.0), None),
        ({"epd": {"fps": 2}, "mm_processor_kwargs": {"fps": 2.0}}, FrameSampling(fps=2.0), None),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, FrameSampling(num_frames=4), None),
        ({"media_io_kwargs": {"image": {"image_mode": "RGB"}, "video": {}}}, FrameSampling(), None),
    ],
)
def test_sampling_of_videos(
    front: Front, more: JSON, frame_sampling: FrameSampling, retention_min: float | None
) -> None:
    assert front.ask(**more).status_code == 200
    request = front.service.requests[0]
    assert (request.frame_sampling, request.retention_min) == (frame_sampling, retention_min)


def test_the_kept_share_of_visual_tokens_is_as_asked_for_or_as_the_server_has_it(
    run_front: Callable[..., Front],
) -> None:
    front = run_front(default_reduction=ReductionPolicy("evs", 0.5))
    for ours in (
        {},
        {"retention": 0.25},
        {"reduction": "random"},
        {"retention": 1.0, "reduction": "uniform"},
    ):
        assert front.ask(epd=ours).status_code == 200
    assert [request.reduction for request in front.service.requests] == [
        ReductionPolicy("evs", 0.5),
        ReductionPolicy("evs", 0.25),
        ReductionPolicy("random", 0.5),
        ReductionPolicy("uniform", 1.0),
    ]


@pytest.mark.parametrize("ours", [{"retention": 0.01}, {"retention": 1.5}, {"reduction": "magic"}])
def test_a_share_or_method_that_is_not_there_is_the_clients_error(front: Front, ours: JSON) -> None:
    response = front.ask(epd=ours)
    assert response.status_code == 400
    assert "allowed" in response.json()["error"]["message"]


def test_conversations_keep_their_order(front: Front) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert front.ask({"messages": messages}).status_code == 200
    received = front.service.requests[0].messages
    assert [message.role for message in received] == ["system", "user", "assistant", "user"]
    assert [[part.text for part in message.parts] for message in received] == [
        ["Be brief."], ["Hello"], ["Hi."], ["a", "b"]
    ]  # fmt: skip
    assert media_kinds(received) == ()


def test_models(front: Front) -> None:
    client = front.openai
    assert [model.id for model in client.models.list()] == ["shapes-vl", "other/vl"]
    assert client.models.retrieve("other/vl").created == 1
    client.chat.completions.create(**{**ASKED, "model": "other/vl"})
    front.ask()
    assert [request.model for request in front.service.requests] == ["other/vl", "shapes-vl"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_its_end_is_no_answer(run_front: Callable[..., Front], stream: bool) -> None:
    front = run_front(FakeService(has_end=False))
    response = front.ask(stream=stream)
    assert '"error"' in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 500)


def test_chat_template_kwargs_reach_the_template(front: Front) -> None:
    """As a message that is no turn: who plans the prompt gives them to the template."""
    assert front.ask(chat_template_kwargs={"add_vision_id": True}).status_code == 200
    first, *_ = front.service.requests[-1].messages
    assert (first.role, first.text) == ("template", '{"add_vision_id": true}')
    for nothing in (None, {}):
        assert front.ask(chat_template_kwargs=nothing).status_code == 200
        assert front.service.requests[-1].messages[0].role == "user"


@pytest.mark.parametrize(
    "wrong", [{"messages": []}, {"tokenize": True}, [], "x", {str(n): n for n in range(65)}]
)
def test_chat_template_kwargs_that_are_none_are_refused(front: Front, wrong: Any) -> None:
    response = front.ask(chat_template_kwargs=wrong)
    assert response.status_code == 400
    assert "chat_template_kwargs" in response.json()["error"]["message"]
    assert front.service.requests == []
