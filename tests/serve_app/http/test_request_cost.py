"""Amounts are refused at the door, by name and at once, whatever is asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from epd.control.request_budget import RequestBudget, RequestLimits
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_parsing import budget_of, conversation
from tests.serve_app.conftest import JSON, QUESTION, Front, data_url, image_part, video_part

ONE: JSON = {"role": "user", "content": "x"}
PART: JSON = {"type": "text", "text": "x"}
CALL: JSON = {"type": "function", "function": {"name": "f", "arguments": "x" * 30}}

# Each a little more than a small limit. The body is made when it is asked for.
TOO_MUCH: dict[str, tuple[dict[str, int], JSON]] = {
    "text": ({"max_text_bytes": 40}, {"messages": [ONE] * 41}),
    "text in UTF-8": ({"max_text_bytes": 40}, {"messages": [{"role": "user", "content": "漢" * 14}]}),
    "text of tool calls": (
        {"max_text_bytes": 40},
        {"messages": [ONE, {"role": "assistant", "tool_calls": [CALL, CALL]}, ONE]},
    ),
    "JSON": ({"max_json_bytes": 200}, {**QUESTION, "user": "u" * 200}),
    "members": ({"max_json_values": 40}, {**QUESTION, "stop_token_ids": [1] * 41}),
    "messages": ({"max_messages": 3}, {"messages": [ONE] * 4}),
    "parts": ({"max_parts": 7}, {"messages": [{"role": "user", "content": [PART] * 4}] * 2}),
    "calls": ({"max_parts": 5}, {"messages": [ONE, {"role": "assistant", "tool_calls": [CALL] * 4}, ONE]}),
    "answers": ({"max_answer_tokens": 100}, {**QUESTION, "max_tokens": 21, "n": 5}),
    "answers by the new name": ({"max_answer_tokens": 100}, {**QUESTION, "max_completion_tokens": 101}),
    "stop": ({"max_stop_chars": 10}, {**QUESTION, "stop": "x" * 11}),
    "stops": ({"max_stop_chars": 10}, {**QUESTION, "stop": ["x" * 4] * 3}),
    "stop strings": ({"max_stop_strings": 2}, {**QUESTION, "stop": ["a", "b", "c"]}),
    "stop_token_ids": ({"max_stop_token_ids": 5}, {**QUESTION, "stop_token_ids": [1] * 6}),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_each_amount_is_refused_by_the_name_of_its_ceiling(
    run_front: Callable[..., Front], name: str
) -> None:
    limits, body = TOO_MUCH[name]
    front = run_front(limits=RequestLimits(**limits))
    response = front.ask(body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_budget")
    assert next(iter(limits)) in error["message"]
    assert front.service.requests == []
    allowed = {limit: 2 * number for limit, number in limits.items()}
    assert run_front(limits=RequestLimits(**allowed)).ask(body).status_code == 200


def test_frames_and_media_are_counted_over_all_media(
    run_front: Callable[..., Front], media: dict[str, Path]
) -> None:
    video, image = (data_url(media[kind], "x/x") for kind in ("video", "image"))
    front = run_front(limits=RequestLimits(max_frames=10, max_media=3))
    parts = (video_part(video), video_part(video), image_part(image))
    assert front.ask_about(*parts, epd={"num_frames": 5}).status_code == 200
    refused = front.ask_about(*parts, mm_processor_kwargs={"num_frames": 6})
    assert "received 12 frames of all videos; allowed 10 (max_frames)" in refused.text
    assert "received 4 media; allowed 3" in front.ask_about(*parts, image_part(image)).text


def test_media_do_not_count_as_text(run_front: Callable[..., Front], media: dict[str, Path]) -> None:
    url = data_url(media["image"], "image/png")
    front = run_front(limits=RequestLimits(max_json_bytes=400, max_text_bytes=50))
    assert len(url) > 400
    assert front.ask_about(image_part(url)).status_code == 200


HUGE: dict[str, Callable[[], bytes]] = {
    "a text of 24 MB": lambda: json.dumps(
        {"messages": [{"role": "user", "content": "word " * (24 << 18)}]}
    ).encode(),
    "20 million integers": lambda: (
        json.dumps(QUESTION).encode()[:-1] + b', "stop_token_ids": [' + b"1," * 20_000_000 + b"1]}"
    ),
    "4 million stop_token_ids": lambda: json.dumps({**QUESTION, "stop_token_ids": [1] * 4_000_000}).encode(),
    "16 stop strings of 100,000": lambda: json.dumps({**QUESTION, "stop": ["x" * 100_000] * 16}).encode(),
    "200,000 unknown fields": lambda: json.dumps(
        {**QUESTION} | {f"f{i}": 1 for i in range(200_000)}
    ).encode(),
    "200,000 unknown fields of a message": lambda: json.dumps(
        {"messages": [ONE | {f"f{i}": 1 for i in range(200_000)}]}
    ).encode(),
    "200,000 wrong messages": lambda: json.dumps({"messages": [{"role": 1}] * 200_000}).encode(),
    "a user of 30 MB": lambda: json.dumps({**QUESTION, "user": "u" * (30 << 20)}).encode(),
}


@cache
def slowness() -> float:
    """How many times longer this machine takes to read JSON than one of 2026, at least 1."""
    text, took = json.dumps([1] * 1_000_000), list[float]()
    for _ in range(3):
        start_s = time.process_time()
        json.loads(text)
        took.append(time.process_time() - start_s)
    return max(1.0, min(took) / 0.05)


@pytest.mark.parametrize("name", HUGE)
def test_what_is_huge_costs_no_more_than_reading_it(front: Front, name: str) -> None:
    """Seconds of the server's event loop are what all other requests wait for."""
    body = HUGE[name]()
    slowest_s = 0.0
    for _ in range(2):  # the first one imports
        start_s = time.process_time()
        response = front.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        slowest_s = max(slowest_s, time.process_time() - start_s)
    assert response.status_code == 400, response.text[:300]
    assert len(response.content) < 1000
    # Of sending, receiving and refusing it, all in this process.
    assert slowest_s < 2.0 * slowness(), slowest_s


def test_a_budget_of_everything() -> None:
    messages = [ONE, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ONE]
    body = {
        "messages": messages, "max_tokens": 10, "n": 3, "stop": ["ab", "c"], "stop_token_ids": [1, 2, 3],
        "epd": {"num_frames": 7},
    }  # fmt: skip
    chat = ChatRequest.model_validate(body)
    cost = budget_of(chat, *conversation(chat.messages), num_bytes=500, context_tokens=8)
    assert cost == RequestBudget(
        num_messages=3, num_parts=4, num_json_bytes=500, num_text_bytes=2 + 31, num_answer_tokens=24,
        num_stop_strings=2, num_stop_chars=3, num_stop_token_ids=3,
    )  # fmt: skip
