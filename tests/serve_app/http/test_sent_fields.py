"""Messages as other clients write and send them back: what cannot change the answer ends no conversation."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd.chat import ChatMessage, ContentPart
from tests.serve_app.conftest import JSON, QUESTION, Front, data_url, image_part, video_part

THEN: list[JSON] = [{"role": "user", "content": "And its colour?"}]
CALL: JSON = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
TOOL: JSON = {"type": "function", "function": {"name": "shot", "parameters": {"type": "object"}}}


def texts(front: Front) -> list[str]:
    return [message.text for message in front.service.requests[-1].messages]


# What an assistant's message has in it, as servers answer and clients send back.
ANSWERED: dict[str, JSON] = {
    "DeepSeek, vLLM": {"reasoning_content": "It is round."},
    "OpenRouter": {
        "reasoning": "It is round.",
        "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
    },
    "LiteLLM": {
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [{"type": "thinking", "thinking": "x"}],
        "function_call": None,
        "tool_calls": None,
        "images": [{"image_url": {"url": "x"}}],
    },
    "OpenAI": {"refusal": None, "annotations": [], "audio": {"id": "audio_1"}, "function_call": None},
    "Azure": {
        "context": {"citations": [{"title": "a"}]},
        "content_filter_results": {"hate": {"severity": "safe"}},
    },
    "LangChain": {
        "additional_kwargs": {},
        "response_metadata": {"model": "x"},
        "id": "run-1",
        "example": False,
    },
    "Vercel": {"createdAt": "2026-11-21", "parts": [{"type": "text"}], "providerOptions": {"x": {}}},
    "nulls of one class for all roles": {
        "tool_call_id": None,
        "name": None,
        "tool_calls": [],
        "images": None,
    },
    "another role's name with a value": {"tool_call_id": "c1", "is_error": False, "status": "success"},
    "fine-tuning": {"weight": 0},
}


@pytest.mark.parametrize("client", ANSWERED)
def test_an_answer_comes_back_with_more_than_was_answered(front: Front, client: str) -> None:
    answered = {"role": "assistant", "content": "circle", **ANSWERED[client]}
    response = front.ask({"messages": [*QUESTION["messages"], answered, *THEN]})
    assert response.status_code == 200, response.text
    assert texts(front) == ["What colour is it?", "circle", "And its colour?"]


PARTS: dict[str, JSON] = {
    "Anthropic's cache, by LiteLLM": {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}},
    "OpenAI's breakpoints": {"type": "text", "text": "look", "prompt_cache_breakpoint": {"mode": "explicit"}},
    "annotations": {"type": "text", "text": "look", "annotations": None, "citations": [], "id": "p1"},
    "nulls of other kinds": {"type": "text", "text": "look", "image_url": None, "video_url": None},
    "parts of /v1/responses": {"type": "input_text", "text": "look"},
    "an answer's": {"type": "output_text", "text": "look", "annotations": [], "logprobs": []},
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_text_has_more_than_its_text(front: Front, kind: str) -> None:
    response = front.ask({"messages": [{"role": "user", "content": [PARTS[kind]]}]})
    assert response.status_code == 200, response.text
    assert texts(front) == ["look"]


def test_what_was_thought_is_no_part_of_an_answer(front: Front) -> None:
    thought: list[Any] = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "text": "hm"},
        {"type": "text", "text": "circle"},
        "!",
    ]
    messages = [*QUESTION["messages"], {"role": "assistant", "content": thought}, *THEN]
    assert front.ask({"messages": messages}).status_code == 200
    assert texts(front)[1] == "circle!"
    messages[1] = {"role": "assistant", "content": thought[:2], "tool_calls": [CALL]}
    messages[2:2] = [{"role": "tool", "tool_call_id": "c1", "content": None}]
    assert front.ask({"messages": messages}).status_code == 200
    assert texts(front)[1:3] == ["", ""]


@pytest.mark.parametrize(
    "content",
    [
        "look",
        ["look"],
        ["lo", "ok"],
        ["lo", {"type": "text", "text": "ok"}],
        [{"type": "text", "text": "look"}],
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant", "tool"])
def test_contents_may_be_lists_of_texts(front: Front, role: str, content: Any) -> None:
    messages = [*QUESTION["messages"], {"role": role, "content": content}, *THEN]
    response = front.ask({"messages": messages})
    assert response.status_code == 200, response.text
    assert texts(front)[1] == "look"


@pytest.mark.parametrize("content", [None, [], ""])
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_an_empty_content_is_an_empty_text(front: Front, role: str, content: Any) -> None:
    messages = [*QUESTION["messages"], {"role": role, "content": content}, *THEN]
    assert front.ask({"messages": messages}).status_code == 200
    assert texts(front)[1] == ""
    asked = front.ask({"messages": [*QUESTION["messages"], {"role": "user", "content": content}]})
    assert "the question is empty" in asked.json()["error"]["message"]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ({"name": "shot", "arguments": '{"at": 3}'}, '{"at": 3}'),
        ({"name": "shot", "arguments": {"at": 3}, "thought_signature": "s"}, '{"at": 3}'),
        ({"name": "shot", "arguments": ""}, "{}"),
        ({"name": "shot", "arguments": None}, "{}"),
        ({"name": "shot"}, "{}"),
    ],
)
def test_calls_come_back_as_clients_keep_them(front: Front, function: JSON, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "index": 0, "extra_content": {"google": {}}, "function": function}
    answered = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call, {**call, "type": None, "id": None}],
    }
    told = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": "a circle",
        "is_error": False,
        "artifact": {"a": 1},
    }
    response = front.ask(
        {
            "messages": [*QUESTION["messages"], answered, told],
            "tools": [
                {
                    **TOOL,
                    "cache_control": {},
                    "id": "t",
                    "function": {**TOOL["function"], "returns": {}, "tags": ["x"]},
                }
            ],
        }
    )
    assert response.status_code == 200, response.text
    definition, _, called, _ = front.service.requests[-1].messages
    assert json.loads(definition.text) == TOOL, "the prompt has no field that is ignored"
    assert [call.arguments for call in called.tool_calls] == [arguments] * 2


SLIPS: dict[str, tuple[Callable[[str], JSON], str]] = {
    "two swapped": (
        lambda url: {"image_url": {"url": url, "detial": "low"}},
        "'detial'; did you mean detail?",
    ),
    "one more": (
        lambda url: {"image_url": {"url": url, "details": "low"}},
        "'details'; did you mean detail?",
    ),
    "one less": (lambda url: {"image_url": {"url": url, "detal": "low"}}, "'detal'; did you mean detail?"),
    "one changed": (lambda url: {"image_url": {"urk": url}}, "'urk'; did you mean url?"),
    "in capitals": (lambda url: {"image_url": {"URL": url}}, "'URL'; did you mean url?"),
    "in camels": (lambda url: {"imageUrl": {"url": url}}, "'imageUrl'; did you mean image_url?"),
    "of the request": (lambda url: {"image_url": url, "fps": 2}, "'fps'; allowed: in mm_processor_kwargs"),
    "of another part": (lambda url: {"image_url": url, "text": "x"}, "'text', which does not belong here"),
}


@pytest.mark.parametrize("kind", SLIPS)
def test_a_field_that_could_change_the_answer_is_refused(
    front: Front, media: dict[str, Path], kind: str
) -> None:
    part, words = SLIPS[kind]
    response = front.ask_about({"type": "image_url", **part(data_url(media["image"], "image/png"))})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert "messages[0].content[0]" in message
    assert words in message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "tool_call": [CALL]}, "'tool_call'; did you mean tool_calls?"),
        ({"role": "assistant", "content": "x", "toolCalls": [CALL]}, "did you mean tool_calls?"),
        ({"role": "tool", "content": "x", "toolCallId": "c1"}, "did you mean tool_call_id?"),
        ({"role": "user", "content": "x", "nmae": "ada"}, "did you mean name?"),
        ({"role": "user", "content": "x", "images": ["iVBORw0KGgo"]}, "'images', which does not belong here"),
        ({"role": "user", "contents": "x"}, "messages[0].content: Field required"),
        ({"role": "user", "content": "x", **{f"f{n}": 1 for n in range(65)}}, "65 fields that are not known"),
    ],
)
def test_a_message_that_means_something_else_is_refused(front: Front, message: JSON, words: str) -> None:
    response = front.ask({"messages": [message, *THEN]})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            {"name": "f", "paramters": {"type": "object"}},
            "tools[0]: received the field 'paramters'; did you mean",
        ),
        ({"name": "f", "input_schema": {"type": "object"}}, "allowed: in parameters; move it"),
    ],
)
def test_a_function_without_what_it_takes_is_refused(front: Front, function: JSON, words: str) -> None:
    response = front.ask(tools=[{"type": "function", "function": function}])
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def forms_of_images(url: str) -> list[JSON]:
    bare = url.partition(",")[2]
    return [
        image_part(url),
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": url, "format": "image/png", "detail": None}},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        image_part(f" {url}\n"),
        image_part(bare),
        {"type": "image_url", "image_url": bare, "cache_control": {"type": "ephemeral"}},
        image_part(url.replace("image/png", "image/png;name=a.png")),
        image_part(url.rstrip("=")),
    ]


def test_an_image_in_any_form_is_the_same_image(front: Front, media: dict[str, Path]) -> None:
    forms = forms_of_images(data_url(media["image"], "image/png"))
    for form in forms:
        response = front.ask_about(form)
        assert response.status_code == 200, (form, response.text)
    assert len({request.media[0].mm_hash for request in front.service.requests}) == 1
    assert len(front.service.requests) == len(forms)


def test_a_detail_beside_a_url_is_the_images(front: Front, media: dict[str, Path]) -> None:
    url = data_url(media["image"], "image/png")
    for part, is_low in (
        ({"image_url": url, "detail": "low"}, True),
        ({"image_url": {"url": url}, "detail": "low"}, True),
        ({"image_url": {"url": url, "detail": "high"}, "detail": "low"}, False),
    ):
        assert front.ask_about({"type": "image_url", **part}).status_code == 200
        assert front.service.requests[-1].media[0].pixels.is_low_detail is is_low


def test_videos_and_sound_may_have_their_url_as_a_text(front: Front, media: dict[str, Path]) -> None:
    url = data_url(media["video"], "video/mp4")
    for part in (video_part(url), {"type": "video_url", "video_url": url}):
        assert front.ask_about(part).status_code == 200
    one, other = front.service.requests
    assert one.media[0].mm_hash == other.media[0].mm_hash


def test_pictures_of_tools_stand_where_the_tool_put_them(front: Front, media: dict[str, Path]) -> None:
    url = data_url(media["image"], "image/png")
    asked = {"role": "user", "content": [{"type": "text", "text": "Which?"}, image_part(url)]}
    told = [{"type": "text", "text": "here: "}, image_part(url)]
    messages = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": told},
    ]
    assert front.ask({"messages": messages}).status_code == 200
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Which?"}, image_part(url)]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c1", "name": "shot", "arguments": "{}", "status": "completed"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "status": None,
            "id": "fo_1",
            "output": [{"type": "input_text", "text": "here: "}, {"type": "input_image", "image_url": url}],
        },
    ]
    assert front.http.post("/v1/responses", json={"input": items}).status_code == 200
    one, other = front.service.requests
    assert one.messages == other.messages
    tool = ChatMessage("tool", (ContentPart("text", "here: "), ContentPart("image")), tool_call_id="c1")
    assert one.messages[2] == tool
    assert [each.mm_hash for each in one.media] == [each.mm_hash for each in other.media]
    assert len(one.media) == 2


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "x"}],
            "status": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "circle", "annotations": [], "logprobs": []}],
        },
        {"role": "assistant", "content": "circle", "type": None, "status": "incomplete", "reasoning": "x"},
    ],
)
def test_items_come_back_as_they_were_answered(front: Front, item: JSON) -> None:
    items = [{"role": "user", "content": "look"}, item, {"role": "user", "content": "b"}]
    response = front.http.post("/v1/responses", json={"input": items})
    assert response.status_code == 200, response.text
    assert texts(front) in (["look", "b"], ["look", "circle", "b"])


NOTHING: list[JSON] = [
    {"stream_options": {"include_usage": True}},
    {"stream_options": {}},
    {"service_tier": "flex"},
    {"prediction": {"type": "content", "content": "x"}},
    {"keep_alive": "5m"},
    {"usage": {"include": True}},
    {"enable_thinking": False},
    {"reasoning": {"enabled": False}},
    {"thinking": {"type": "disabled"}},
    {"separate_reasoning": True},
    {"logit_bias": None},
    {"stop": None},
    {"stop": []},
    {"tools": []},
]


@pytest.mark.parametrize("more", NOTHING, ids=json.dumps)
def test_what_cannot_change_the_answer_is_taken(front: Front, more: JSON) -> None:
    assert front.ask(**more).status_code == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_any_field_but_the_question_may_be_null(front: Front, route: str) -> None:
    """As clients write all fields of their classes."""
    names = front.http.get("/openapi.json").json()["components"]["schemas"]
    body = {"messages": QUESTION["messages"]} if "chat" in route else {"input": "What colour is it?"}
    schema = names["ChatRequest" if "chat" in route else "ResponseRequest"]
    nulls = dict.fromkeys(schema["properties"].keys() - body.keys())
    assert len(nulls) > 40
    response = front.http.post(route, json={**body, **nulls})
    assert response.status_code == 200, response.text


def test_sound_may_come_as_a_data_url_too(front: Front, media: dict[str, Path]) -> None:
    data = base64.b64encode(media["image"].read_bytes()).decode()
    answers = [
        front.ask_about({"type": "input_audio", "input_audio": {"data": form, "format": "wav"}}).json()
        for form in (data, f"data:;base64,{data}", f"data:audio/wav;base64,{data}")
    ]
    assert answers[0] == answers[1] == answers[2]
    assert "base64" not in answers[0]["error"]["message"]
