"""`/v1/responses` through the official client: what it becomes, its events, its fields done or refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from epd.errors import OverloadedError
from epd.serve_app.http.requests.response_request import RESPONSE_FIELDS, ResponseRequest
from tests.request_fields_page import RESPONSES
from tests.serve_app.conftest import JSON, Front, data_url, image_part, video_part
from tests.serve_app.fakes import USAGE, WORDS, FakeService
from tests.serve_app.http.test_tools import TEXT as CALLS
from tests.serve_app.http.test_tools import WEATHER
from tests.serve_app.http.test_tools import WORDS as CALL_WORDS
from tests.serve_app.server import wait_until

PATH = "/v1/responses"
TEXT = "".join(WORDS)
TOOLS: list[JSON] = [
    {"type": "function", **WEATHER["function"]},
    {"type": "function", "name": "now", "strict": None},
]


def ask(front: Front, **body: Any) -> httpx.Response:
    return front.http.post(PATH, json={"input": "What colour is it?", **body})


def refusal(front: Front, **body: Any) -> str:
    """The message of a 400, of which no worker hears."""
    response = ask(front, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert front.service.requests == []
    return str(error["message"])


def events(front: Front, **body: Any) -> list[JSON]:
    response = ask(front, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def kinds(found: list[JSON]) -> list[str]:
    return [each["type"].removeprefix("response.") for each in found]


def comparable(reply: JSON) -> str:
    """A response without what differs from one request to the next."""
    seconds = {name: value for name, value in reply["epd"].items() if not name.endswith("_s")}
    text = json.dumps({**reply, "epd": seconds, "created_at": 0})
    for call in reply["output"]:
        text = text.replace(call.get("call_id", " "), "call")
    return text.replace(reply["id"].removeprefix("resp_"), "")


def test_the_official_client_gets_a_response(front: Front) -> None:
    found = front.openai.responses.create(model="shapes-vl", input="What colour is it?")
    assert (found.object, found.status, found.output_text) == ("response", "completed", TEXT)
    assert found.id.startswith("resp_")
    (message,) = found.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (
        USAGE.prompt_tokens,
        USAGE.completion_tokens,
    )
    assert found.usage.input_tokens_details.cached_tokens == 16
    (request,) = front.service.requests
    assert request.request_id == found.id
    assert front.ask().status_code == 200
    assert front.service.requests[1].messages == request.messages


def test_a_response_has_every_field_that_the_official_types_require(front: Front) -> None:
    options: list[JSON] = [{}, {"tools": TOOLS}, {"include": ["message.output_text.logprobs"]}]
    for more in options:
        Response.model_validate(ask(front, **more).json())


def test_options_are_those_of_a_chat(front: Front) -> None:
    options: JSON = {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 7,
        "stop": ["x"], "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [9], "include_stop_str_in_output": True,
        "logit_bias": {"5": -1.0}, "bad_words": ["red", "two"], "priority": 3, "cache_salt": "s",
        "epd": {"retention": 0.5, "deadline_s": 9.0},
        "media_io_kwargs": {"video": {"fps": 2.0}}, "mm_processor_kwargs": {"fps": 2.0},
    }  # fmt: skip
    include = ["message.output_text.logprobs"]
    ours = ask(front, **options, max_output_tokens=40, include=include, top_logprobs=2)
    assert ours.status_code == 200, ours.text
    assert front.ask(**options, max_tokens=40, logprobs=True, top_logprobs=2).status_code == 200
    one, other = front.service.requests
    assert one.frame_sampling.fps == 2.0
    for name in ("sampling", "frame_sampling", "reduction", "priority", "cache_salt", "retention_min"):
        assert getattr(one, name) == getattr(other, name)
    reply = ours.json()
    assert [reply[name] for name in ("temperature", "top_p", "max_output_tokens")] == [0.5, 0.9, 40]
    assert ask(front, model="none").status_code == 404
    assert ask(front, priority=-1).status_code == 403


def test_an_expression_holds_the_answer_as_a_chats(front: Front) -> None:
    options: JSON = {"structured_outputs": {"regex": "a+"}, "stream": True}
    assert ask(front, **options, stream_options={"include_obfuscation": True}).status_code == 200
    assert front.ask(**options).status_code == 200
    one, other = front.service.requests
    assert one.sampling.grammar == other.sampling.grammar != ""


def test_what_was_asked_for_comes_back(front: Front) -> None:
    reply = ask(front, instructions="Be brief.", metadata={"a": "b"}, store=True, tools=TOOLS).json()
    assert (reply["instructions"], reply["metadata"], reply["store"]) == ("Be brief.", {"a": "b"}, False)
    assert reply["tools"][0] == TOOLS[0]
    assert (reply["tool_choice"], reply["parallel_tool_calls"]) == ("auto", True)
    assert front.http.get(f"{PATH}/{reply['id']}").status_code == 404


def test_items_become_the_messages_of_a_chat(front: Front, media: dict[str, Path]) -> None:
    image, video = data_url(media["image"], "image/png"), data_url(media["video"], "video/mp4")
    call: JSON = {"name": "look", "arguments": '{"at": 3}'}
    items: list[JSON] = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Look: "},
                {"type": "input_image", "image_url": image, "detail": "low", "file_id": None},
                video_part(video),
            ],
        },
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [{"type": "output_text", "text": "I do.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "call_1", "id": "fc_1", "status": "completed", **call},
        {"type": "function_call", "call_id": "call_2", **call},
        {"type": "function_call_output", "call_id": "call_1", "output": "a red circle"},
        {
            "type": "function_call_output", "call_id": "call_2",
            "output": [{"type": "input_text", "text": "nothing"}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    low = {"type": "image_url", "image_url": {"url": image, "detail": "low"}}
    messages: list[JSON] = [
        {"role": "system", "content": "You are."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, low, video_part(video)]},
        {
            "role": "assistant",
            "content": "I do.",
            "tool_calls": [
                {"id": f"call_{number}", "type": "function", "function": call} for number in (1, 2)
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a red circle"},
        {"role": "tool", "tool_call_id": "call_2", "content": "nothing"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": "And now?"},
    ]
    response = ask(front, input=items, instructions="You are.")
    assert response.status_code == 200, response.text
    assert front.ask({"messages": messages}).status_code == 200
    ours, chat = front.service.requests
    assert ours.messages == chat.messages
    assert [(each.mm_hash, each.pixels) for each in ours.media] == [
        (each.mm_hash, each.pixels) for each in chat.media
    ]
    assert ours.media[0].pixels.is_low_detail
    assert front.service.files_seen[0] == front.service.files_seen[1]


def test_what_was_answered_can_be_sent_back(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.service, "words", CALL_WORDS)
    first = front.openai.responses.create(model="shapes-vl", input="Look it up.", tools=TOOLS)  # type: ignore[call-overload]
    said: list[Any] = [{"role": "user", "content": "Look it up."}, *first.output]
    said += [
        {"type": "function_call_output", "call_id": each.call_id, "output": "sunny"}
        for each in first.output
        if each.type == "function_call"
    ]
    second = front.openai.responses.create(model="shapes-vl", input=said, tools=TOOLS)  # type: ignore[call-overload]
    assert second.status == "completed"
    _, request = front.service.requests
    assert [each.role for each in request.messages] == ["tools", "user", "assistant", "tool", "tool"]
    assert [call.name for call in request.messages[2].tool_calls] == ["weather", "now"]


def test_events_of_a_text(front: Front) -> None:
    found = events(front)
    assert kinds(found) == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(WORDS),
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [each["delta"] for each in found if "delta" in each] == list(WORDS)
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert (found[2]["item"]["content"], found[2]["item"]["status"]) == ([], "in_progress")
    assert len({each["item_id"] for each in found if "item_id" in each}) == 1
    assert comparable(found[-1]["response"]) == comparable(ask(front).json())


def test_events_of_calls(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.service, "words", CALL_WORDS)
    found = events(front, tools=TOOLS)
    whole = ask(front, tools=TOOLS).json()
    assert comparable(found[-1]["response"]) == comparable(whole)
    assert [each["type"] for each in whole["output"]] == ["message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == CALLS.partition("<tool_call>")[0]
    assert [(each["name"], json.loads(each["arguments"])) for each in whole["output"][1:]] == [
        ("weather", {"city": "Rome"}),
        ("now", {}),
    ]
    for index in (1, 2):
        mine = [each for each in found if each.get("output_index") == index]
        assert kinds(mine)[0] == "output_item.added"
        assert kinds(mine)[-2:] == ["function_call_arguments.done", "output_item.done"]
        deltas = "".join(each["delta"] for each in mine if "delta" in each)
        assert deltas == mine[-2]["arguments"] == mine[-1]["item"]["arguments"]


def test_the_helpers_of_the_client_gather_a_stream(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front.service, "words", CALL_WORDS)
    with front.openai.responses.stream(model="shapes-vl", input="x", tools=TOOLS) as stream:  # type: ignore[arg-type]
        for event in stream:
            assert event.type
        final = stream.get_final_response()
    assert [each.type for each in final.output] == ["message", "function_call", "function_call"]
    assert final.usage is not None


def test_an_answer_that_was_cut_is_incomplete(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = FakeService._delta

    def cut(*args: Any) -> Any:
        made = delta(*args)
        object.__setattr__(made, "finish_reason", made.finish_reason and "length")
        return made

    monkeypatch.setattr(FakeService, "_delta", cut)
    reply = ask(front).json()
    assert (reply["status"], reply["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert reply["output"][0]["status"] == "incomplete"
    assert events(front)[-1]["type"] == "response.incomplete"


def test_an_empty_answer_has_a_message(run_front: Callable[..., Front]) -> None:
    for tools in ([], TOOLS):
        front = run_front(FakeService(words=("",)))
        reply = ask(front, tools=tools).json()
        assert [part["text"] for part in reply["output"][0]["content"]] == [""]
        found = events(front, tools=tools)
        assert comparable(found[-1]["response"]) == comparable(reply)
        assert not any("delta" in each for each in found)


def test_the_beginning_of_a_call_that_never_comes_is_text(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(words=("Look <tool", "_c")))
    assert ask(front, tools=TOOLS).json()["output"][0]["content"][0]["text"] == "Look <tool_c"
    deltas = [each["delta"] for each in events(front, tools=TOOLS) if "delta" in each]
    assert "".join(deltas) == "Look <tool_c"


def test_logprobs(front: Front) -> None:
    options: JSON = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = ask(front, **options).json()["output"][0]["content"]
    assert [token["token"] for token in part["logprobs"]] == list(WORDS)
    assert [one["logprob"] for one in part["logprobs"][0]["top_logprobs"]] == [-1.0, -2.0]
    streamed = [token for each in events(front, **options) if "delta" in each for token in each["logprobs"]]
    assert streamed == part["logprobs"]
    assert ask(front).json()["output"][0]["content"][0]["logprobs"] == []


def test_errors_are_those_of_a_chat(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(error=OverloadedError("busy", 2.0)))
    for stream in (False, True):
        response = ask(front, stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    late = run_front(FakeService(error=OverloadedError("busy", 2.0), words_before_error=2))
    last = events(late)[-1]
    assert (last["type"], last["code"], last["message"]) == ("error", "overloaded", "busy")
    with pytest.raises(openai.APIError, match="busy"):
        list(late.openai.responses.create(model="shapes-vl", input="x", stream=True))
    unfinished = run_front(FakeService(has_end=False))
    assert ask(unfinished).status_code == 500
    guarded = run_front(api_key="the key", allowed_hosts=frozenset({"localhost"}))
    assert ask(guarded).status_code == 401
    right = {"authorization": "Bearer the key"}
    assert guarded.http.post(PATH, json={"input": "x"}, headers=right).status_code == 200
    foreign = guarded.http.post(PATH, json={"input": "x"}, headers={**right, "host": "evil.example"})
    assert foreign.json()["error"]["code"] == "host_forbidden"
    counted = 'epd_requests_total{status="200",stream="false"} 1.0'
    wait_until(lambda: counted in guarded.http.get("/metrics").text)


def user(*parts: JSON) -> JSON:
    return {"input": [{"role": "user", "content": list(parts)}]}


IMAGE: JSON = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
CALL: JSON = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "input: List should have at least 1 item"),
        ({"input": 3}, "input"),
        ({"input": ""}, "the question is empty"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "received an input without messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: received another item"),
        ({"input": [[]]}, "input[0]: received another item"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0]: received another item; allowed: mess"),
        ({"input": [{"role": "user", "content": "x", "nmae": "a"}]}, "input[0]: received the field 'nmae'"),
        (user({"type": "input_file", "file_id": "f"}), "input[0].content[0]"),
        (user({"type": "input_image", "file_id": "f"}), "input[0].content[0]"),
        (user({"type": "refusal", "refusal": "no"}), "input[0].content[0]: Input tag 'refusal'"),
        ({"input": [{"role": "system", "content": [IMAGE]}]}, "input[0].content[0].type: Input"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "Input tag 'input_image'"),
        ({"input": [CALL]}, "none of the user"),
        ({"input": [{"role": "user", "content": "x"}, CALL]}, "the last message is the assistant's"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: Input should be 'function'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "received tool_choice 'f'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "format of type json_schema without"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"include": ["message.output_text.logprobs"], "tools": TOOLS}, "logprobs with tools"),
        ({"top_logprobs": 1}, "received top_logprobs alone"),
        ({"epd": {"events": True}}, "received epd.events"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "received previous_response_id; allowed: null"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation as input"),
        ({"conversation": "c"}, "send the whole conversation as input"),
        ({"background": True}, "leave it out and set stream, or use `epd batch`"),
        ({"messages": []}, "received the field 'messages'"),
        ({"inputs": "x"}, "did you mean input?"),
        ({"n": 2}, "received the field 'n'"),
        ({"input": [{"role": "user", "content": "x"}] * 2000}, "received 2,000 messages; allowed 1,024"),
        ({"input": [*[CALL] * 5000, {"role": "user", "content": "x"}]}, "allowed 4,096 (max_parts)"),
        ({"input": "x" * (3 << 20)}, "max_text_bytes"),
        ({"input": json.loads("[" * 50 + "]" * 50)}, "input[0]"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(front: Front, body: JSON, words: str) -> None:
    message = refusal(front, **body)
    assert words in message
    assert len(message) < 500


def test_an_image_that_is_none_is_refused(front: Front) -> None:
    wrong = base64.b64encode(b"no image").decode()
    content = [{"type": "input_image", "image_url": f"data:image/png;base64,{wrong}"}]
    ours = ask(front, input=[{"role": "user", "content": [*content, {"type": "input_text", "text": "x"}]}])
    chat = front.ask_about(image_part(f"data:image/png;base64,{wrong}"))
    assert ours.status_code == chat.status_code == 400
    assert ours.json() == chat.json()


def nothing_asked() -> Iterator[tuple[str, Any]]:
    for name, values in RESPONSE_FIELDS.refused.items():
        yield from ((name, value) for value in (None, *values))


@pytest.mark.parametrize(("name", "value"), list(nothing_asked()), ids=str)
def test_a_value_that_asks_for_nothing_is_taken(front: Front, name: str, value: object) -> None:
    assert ask(front, **{name: value}).status_code == 200


@pytest.mark.parametrize("name", RESPONSE_FIELDS.no_effect)
def test_harmless_fields_are_taken(front: Front, name: str) -> None:
    assert ask(front, **{name: "anything"}).status_code == 200


@pytest.mark.parametrize("name", RESPONSE_FIELDS.refused)
def test_every_field_that_is_not_done_is_refused_by_name(front: Front, name: str) -> None:
    message = refusal(front, **{name: {"wanted": 1}})
    assert message.startswith(f"received {name}; allowed: null")
    assert message.endswith(RESPONSE_FIELDS.advice.get(name, "leave it out"))


def test_every_field_of_openai_and_vllm_is_known() -> None:
    known = [*ResponseRequest.model_fields, *RESPONSE_FIELDS.no_effect, *RESPONSE_FIELDS.refused]
    assert len(known) == len(set(known))
    assert (RESPONSES.openai | RESPONSES.vllm) - set(known) == set()


def test_chat_template_kwargs_are_those_of_a_chat(front: Front) -> None:
    assert ask(front, chat_template_kwargs={"enable_thinking": False}).status_code == 200
    first, *_ = front.service.requests[-1].messages
    assert (first.role, first.text) == ("template", '{"enable_thinking": false}')
    front.service.requests.clear()
    assert "chat_template_kwargs" in refusal(front, chat_template_kwargs={"chat_template": "{{ x }}"})
