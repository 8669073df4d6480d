"""Tools as OpenAI has them, through its official client: what is offered, called, streamed and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epd.chat import ContentPart
from tests.serve_app.conftest import JSON, QUESTION, Front

WEATHER: JSON = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks it up.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOW: JSON = {"type": "function", "function": {"name": "now"}}
TEXT = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
WORDS = tuple(TEXT[i : i + 5] for i in range(0, len(TEXT), 5))


def create(front: Front, **more: Any) -> Any:
    return front.openai.chat.completions.create(model="shapes-vl", **QUESTION, **more)


def test_calls_of_a_whole_answer(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.service, "words", WORDS)
    choice = create(front, tools=[WEATHER, NOW]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look.\n"
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Rome"}),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}])
def test_streamed_calls_add_up_to_those_of_a_whole_answer(
    front: Front, monkeypatch: pytest.MonkeyPatch, more: JSON
) -> None:
    monkeypatch.setattr(front.service, "words", WORDS)
    chunks = list(create(front, tools=[WEATHER, NOW], stream=True, **more))
    deltas = [choice for chunk in chunks for choice in chunk.choices if choice.index == more.get("n", 1) - 1]
    content = "".join(each.delta.content or "" for each in deltas)
    pieces = [piece for each in deltas for piece in each.delta.tool_calls or ()]
    assert content == "Let me look.\n"
    assert [(piece.index, piece.function.name) for piece in pieces if piece.id] == [
        (0, "weather"),
        (1, "now"),
    ]
    assert all(piece.function.name is None for piece in pieces if not piece.id)
    arguments = ["".join(p.function.arguments for p in pieces if p.index == index) for index in range(2)]
    assert list(map(json.loads, arguments)) == [{"city": "Rome"}, {}]
    assert len([piece for piece in pieces if piece.index == 0]) > 2, "arguments come as they are written"
    assert [each.finish_reason for each in deltas if each.finish_reason] == ["tool_calls"]
    if "logprobs" in more:
        reported = [token for each in deltas if each.logprobs for token in each.logprobs.content]
        assert len(reported) == len(WORDS)


def test_the_helpers_of_the_client_gather_a_stream(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.service, "words", WORDS)
    with front.openai.chat.completions.stream(model="shapes-vl", tools=[NOW, WEATHER], **QUESTION) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in final.tool_calls or ()] == ["weather", "now"]


@pytest.mark.parametrize("more", [{}, {"tools": [NOW], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_a_text_stays_one(front: Front, monkeypatch: pytest.MonkeyPatch, more: JSON) -> None:
    monkeypatch.setattr(front.service, "words", WORDS)
    choice = create(front, **more).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TEXT, None, "stop")
    assert all(message.role != "tools" for message in front.service.requests[-1].messages)


def test_the_model_is_told_of_the_tools_and_what_was_called(front: Front) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *QUESTION["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    assert front.ask({"messages": messages}, tools=[NOW]).status_code == 200
    tools, *turns = front.service.requests[-1].messages
    assert tools.role == "tools"
    assert tools.parts == (ContentPart("text", '{"type":"function","function":{"name":"now"}}'),)
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("more", "words", "others"),
    [
        ({"tool_choice": "required"}, ("weather", "now", "call)*"), ()),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("weather", "now"), ("call)*",)),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ("now",), ("weather", "call)*")),
    ],
)
def test_a_required_call_is_held_to_its_schema(
    front: Front, more: JSON, words: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert front.ask(tools=[WEATHER, NOW], **more).status_code == 200
    grammar = front.service.requests[-1].sampling.grammar
    assert all(word in grammar for word in words)
    assert not any(word in grammar for word in others)


def test_a_call_that_is_left_to_the_model_is_not(front: Front) -> None:
    assert front.ask(tools=[WEATHER], tool_choice="auto").status_code == 200
    assert front.service.requests[-1].sampling.grammar == ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [NOW, NOW]}, "2 tools of 1 names"),
        ({"tool_choice": "required"}, "tool_choice without tools"),
        ({"tool_choice": "auto"}, "tool_choice without tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "allowed: now"),
        ({"tools": [NOW] * 129}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].name: String should",
        ),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, "tools with another format"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "Unimplemented keys",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(front: Front, more: JSON, words: str) -> None:
    response = front.ask(**more)
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    assert front.service.requests == []
