"""No field is ignored silently: each is done, is harmless, asks for nothing, or is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd.chat import ChatMessage, ContentPart, ToolCall
from epd.reduction import METHODS
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_fields import NO_EFFECT, REFUSED
from tests.request_fields_page import HONOURED, OPENAI, PAGE, TESTS, VLLM, with_tables
from tests.serve_app.conftest import JSON, QUESTION, Front

# What SERVING.md found taken and ignored, with a value that asks for something.
ONCE_IGNORED: JSON = {
    "guided_json": {"type": "object"}, "prompt_logprobs": 1, "echo": True,
    "allowed_token_ids": [5], "use_beam_search": True, "length_penalty": 0.5,
    "best_of": 4, "continue_final_message": True, "chat_template": "{{ messages }}",
    "reasoning_effort": "high", "truncate_prompt_tokens": 5, "skip_special_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE_IGNORED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(front: Front, name: str) -> None:
    response = front.ask(**{name: ONCE_IGNORED[name]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(f"received {name}; allowed: ")
    assert error["message"].endswith("leave it out")
    assert error["type"] == "invalid_request_error"
    assert front.service.requests == []


def nothing_asked() -> Iterator[tuple[str, Any]]:
    for name, values in REFUSED.items():
        yield from ((name, value) for value in (None, *values))


@pytest.mark.parametrize(("name", "value"), list(nothing_asked()), ids=str)
def test_a_value_that_asks_for_nothing_is_taken(front: Front, name: str, value: object) -> None:
    assert front.ask(**{name: value}).status_code == 200


@pytest.mark.parametrize("name", NO_EFFECT)
def test_harmless_fields_are_taken(front: Front, name: str) -> None:
    assert front.ask(**{name: "anything"}).status_code == 200


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temprature", "did you mean temperature?"),
        ("max_token", "did you mean max_tokens?"),
        ("unheard_of", "leave it out"),
        ("x" * 100_000, "leave it out"),
    ],
)
def test_an_unknown_field_is_refused_by_name(front: Front, name: str, words: str) -> None:
    message = front.ask(**{name: 1}).json()["error"]["message"]
    assert message.startswith(f"received the field '{name[:20]}")
    assert words in message
    assert len(message) < 300


@pytest.mark.parametrize("name", REFUSED)
def test_every_field_that_is_not_done_is_refused_by_name(front: Front, name: str) -> None:
    response = front.ask(**{name: {"wanted": 1}})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(f"received {name}; allowed: null")


def test_every_field_of_openai_and_vllm_is_known() -> None:
    known = ChatRequest.model_fields.keys() | NO_EFFECT.keys() | REFUSED.keys()
    assert (OPENAI | VLLM) - known == set()


def test_each_field_has_one_meaning() -> None:
    fields = [*ChatRequest.model_fields, *NO_EFFECT, *REFUSED]
    assert len(fields) == len(set(fields))


def test_the_documents_say_of_every_field_what_happens() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run python -m tests.request_fields_page"


def test_every_field_that_is_done_is_documented_and_tested() -> None:
    assert list(HONOURED) == list(ChatRequest.model_fields)
    for name in HONOURED:
        path = Path(__file__).with_name(TESTS.get(name, "test_completions.py"))
        assert name in path.read_text(encoding="utf-8"), f"{path.name} does not mention {name}"


def of_parts(*parts: JSON) -> JSON:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({**QUESTION, "response_format": {"type": "text", "strct": 1}}, "response_format.strct"),
        ({**QUESTION, "epd": {"fsp": 2}}, "epd.fsp"),
        (
            {**QUESTION, "stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
        ),
    ],
)
def test_unknown_fields_within_are_refused_by_place(front: Front, body: JSON, place: str) -> None:
    response = front.ask(body)
    assert response.status_code == 400
    assert f"{place}: unknown field; leave it out" in response.json()["error"]["message"]


CALL: JSON = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}


def test_histories_that_clients_send_by_default_are_taken(front: Front) -> None:
    """As the official client dumps the messages that it got, nulls included."""
    messages: list[JSON] = [
        {"role": "user", "content": "What is there?", "name": "ada"},
        {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a red circle"},
        {"role": "assistant", "content": None, "refusal": "I would rather not."},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "nothing"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    response = front.ask({"messages": messages})
    assert response.status_code == 200, response.text
    got = front.service.requests[0].messages
    assert got == (
        ChatMessage("user", (ContentPart("text", "What is there?"),), name="ada"),
        ChatMessage(
            "assistant", (ContentPart("text"),), tool_calls=(ToolCall("look", '{"at": 3}', "call_1"),)
        ),
        ChatMessage("tool", (ContentPart("text", "a red circle"),), tool_call_id="call_1"),
        ChatMessage("assistant", (ContentPart("text", "I would rather not."),)),
        ChatMessage("assistant", (ContentPart("text"),), tool_calls=(ToolCall("look", "{}"),)),
        ChatMessage("tool", (ContentPart("text", "nothing"),), name="look"),
        ChatMessage("assistant", (ContentPart("text"),)),
        ChatMessage("user", (ContentPart("text", "And now?"),)),
    )


def test_a_conversation_may_end_with_what_a_tool_said(front: Front) -> None:
    messages = [*QUESTION["messages"], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    answered = [*messages, {"role": "tool", "tool_call_id": "call_1", "content": ""}]
    assert front.ask({"messages": answered}).status_code == 200
    assert front.ask({"messages": messages}).status_code == 400


def test_no_top_logprobs_without_logprobs_asks_for_nothing(front: Front) -> None:
    response = front.ask(top_logprobs=0)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["logprobs"] is None


def test_the_page_offers_every_reduction_method(front: Front) -> None:
    listed = front.http.get("/").text.split('id="reduction"')[1].split("</select>")[0]
    assert re.findall(r"<option>(\w+)</option>", listed) == list(METHODS)
