"""A server with parsers parts thoughts and calls from answers, in the fields that clients of vLLM read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from epd.serve_app.http.chat_answers import ApiSettings
from tests.serve_app.conftest import QUESTION, Front, running_front
from tests.serve_app.fakes import FakeService
from tests.serve_app.http.test_tools import NOW, WEATHER

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
TEXT = f"Rome, <b>?\n</think>\n\nLet me look.\n{CALL}"
WORDS = tuple(TEXT[i : i + 5] for i in range(0, len(TEXT), 5))
THOUGHT, CONTENT = "Rome, <b>?\n", "\n\nLet me look.\n"


@pytest.fixture(scope="module")
def thinking() -> Iterator[Front]:
    settings = ApiSettings(reasoning_parser="qwen3", tool_call_parser="qwen3_coder")
    with running_front(FakeService(words=WORDS, thinks=True), settings) as front:
        yield front


def test_a_whole_answer_has_thought_content_and_calls(thinking: Front) -> None:
    choice = thinking.ask(tools=[WEATHER]).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (
        THOUGHT,
        THOUGHT,
        CONTENT,
    )
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "weather",
        {"city": "Rome"},
    )
    assert choice["finish_reason"] == "tool_calls"


def deltas(front: Front, **more: Any) -> list[dict[str, Any]]:
    lines = front.ask(stream=True, **more).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_a_stream_has_them_in_their_order(thinking: Front) -> None:
    found = deltas(thinking, tools=[WEATHER])
    kinds = [next(iter(each.keys() - {"role"})) if len(each) == 1 else sorted(each)[-1] for each in found[1:]]
    assert "".join(each.get("reasoning", "") for each in found) == THOUGHT
    assert "".join(each.get("reasoning_content", "") for each in found) == THOUGHT
    assert "".join(each.get("content") or "" for each in found) == CONTENT
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)


def test_without_tools_a_call_stays_content(thinking: Front) -> None:
    message = thinking.ask().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (THOUGHT, f"\n\nLet me look.\n{CALL}")
    assert "".join(each.get("content") or "" for each in deltas(thinking)) == f"\n\nLet me look.\n{CALL}"


def test_an_answer_that_follows_a_schema_is_no_thought(thinking: Front) -> None:
    message = thinking.ask(response_format={"type": "json_object"}).json()["choices"][0]["message"]
    assert message["content"] == TEXT
    assert "reasoning" not in message


def test_responses_have_an_item_for_the_thought(thinking: Front) -> None:
    body = {"model": "shapes-vl", "input": "What?", "tools": [{"type": "function", **WEATHER["function"]}]}
    output = thinking.http.post("/v1/responses", json=body).json()["output"]
    assert [each["type"] for each in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert output[1]["content"][0]["text"] == CONTENT
    streamed = thinking.http.post("/v1/responses", json={**body, "stream": True}).text
    events = [
        json.loads(line.removeprefix("data: ")) for line in streamed.split("\n") if line.startswith("data")
    ]
    said = "".join(each["delta"] for each in events if each["type"] == "response.reasoning_text.delta")
    assert said == THOUGHT
    last = events[-1]["response"]["output"]
    assert [each["type"] for each in last] == [each["type"] for each in output]
    assert last[0]["content"] == output[0]["content"]


def test_a_server_without_parsers_leaves_the_text(thinking: Front) -> None:
    with running_front(FakeService(words=WORDS, thinks=True)) as front:
        message = front.ask().json()["choices"][0]["message"]
        assert message["content"] == TEXT
        assert not [name for name in message if name.startswith("reasoning")]


def test_a_model_may_choose_calls_only_where_the_server_lets_it() -> None:
    with running_front(FakeService(), ApiSettings(enable_auto_tool_choice=False)) as front:
        for more in ({}, {"tool_choice": "auto"}):
            refused = front.ask(tools=[NOW], **more)
            assert refused.status_code == 400
            assert "tool_choice auto; allowed: none, required" in refused.json()["error"]["message"]
        assert front.ask(tools=[NOW], tool_choice="none").status_code == 200
        assert front.ask({"messages": QUESTION["messages"]}).status_code == 200
