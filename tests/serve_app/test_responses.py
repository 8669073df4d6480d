"""The whole application answers `/v1/responses` as the same chat: text, media, formats, functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from epd.models import embedded_model_path
from tests.clear_draws import clear_draws
from tests.serve_app.conftest import JSON, data_url, image_part, video_part
from tests.serve_app.real_app import RealApp, real_app

TEXT: JSON = {"type": "input_text", "text": "Which shapes are there?"}
SAMPLINGS: dict[str, JSON] = {
    "greedy": {"temperature": 0, "max": 24},
    "drawn": {"temperature": 1.8, "seed": 11, "max": 24},
}
TOOL: JSON = {
    "type": "function",
    "name": "draw",
    "parameters": {
        "type": "object",
        "properties": {"shape": {"enum": ["circle", "square"]}, "note": {"type": "string", "maxLength": 12}},
        "required": ["shape", "note"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Shape(BaseModel):
    colour: Literal["red", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with real_app(embedded_model_path(), "1e1p1d") as running:
        yield running
        running.wait_until_empty()
        assert running.num_workers_lost == 0


@pytest.fixture
def client(app: RealApp) -> Iterator[OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=200) as http,
        OpenAI(base_url=f"{app.url}/v1", api_key="none", http_client=http, max_retries=0) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def contents(media: dict[str, Path]) -> dict[str, tuple[list[JSON], list[JSON]]]:
    """Parts of a message by what is in it, as responses have them, and as chats do."""
    image, video = data_url(media["image"], "image/png"), data_url(media["video"], "video/mp4")
    text: JSON = {"type": "text", "text": TEXT["text"]}
    shown: JSON = {"type": "input_image", "image_url": image}
    return {
        "text": ([TEXT], [text]),
        "image": ([shown, TEXT], [image_part(image), text]),
        "video": ([video_part(video), TEXT], [video_part(video), text]),
        "both": ([shown, video_part(video), TEXT], [image_part(image), video_part(video), text]),
    }


def options(sampling: str, name_of_max: str) -> JSON:
    given = dict(SAMPLINGS[sampling])
    seed = {"extra_body": {"seed": given.pop("seed")}} if "seed" in given else {}
    return {name_of_max: given.pop("max"), **given, **seed}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["text", "image", "video", "both"])
def test_the_answer_is_that_of_the_chat(
    client: OpenAI, contents: dict[str, tuple[list[JSON], list[JSON]]], name: str, sampling: str
) -> None:
    items, parts = contents[name]
    messages: Any = [{"role": "user", "content": parts}]
    received: Any = [{"role": "user", "content": items}]
    given = options(sampling, "max_output_tokens")
    with clear_draws():
        chat = client.chat.completions.create(
            model="tiny", messages=messages, **options(sampling, "max_tokens")
        )
    whole = client.responses.create(model="tiny", input=received, **given)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    events = list(client.responses.create(model="tiny", input=received, stream=True, **given))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == (
        whole.output_text
    )
    last = events[-1]
    assert last.type in {"response.completed", "response.incomplete"}
    assert last.response.output_text == whole.output_text  # type: ignore[union-attr]
    assert [each.sequence_number for each in events] == list(range(len(events)))


def test_the_official_client_parses_a_response(client: OpenAI) -> None:
    given: JSON = {"max_output_tokens": 400, "temperature": 0.5, "extra_body": {"seed": 5}}
    parsed = client.responses.parse(model="tiny", input=TEXT["text"], text_format=Shape, **given)
    assert isinstance(parsed.output_parsed, Shape)
    with client.responses.stream(model="tiny", input=TEXT["text"], text_format=Shape, **given) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_any_object(client: OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_object"}}
    found = client.responses.create(
        model="tiny",
        input=TEXT["text"],
        text=wanted,
        max_output_tokens=400,
        temperature=0.5,
        extra_body={"structured_outputs": None, "seed": 5},
    )
    assert found.status == "incomplete" or isinstance(json.loads(found.output_text), dict)


def test_a_required_call_and_its_output(client: OpenAI) -> None:
    given: JSON = {"tools": [TOOL], "temperature": 1.5, "max_output_tokens": 400, "extra_body": {"seed": 5}}
    choice: Any = {"type": "function", "name": "draw"}
    first = client.responses.create(model="tiny", input=TEXT["text"], tool_choice=choice, **given)
    (call,) = first.output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"shape", "note"}
    events = list(
        client.responses.create(model="tiny", input=TEXT["text"], tool_choice=choice, stream=True, **given)
    )
    pieces = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    said: Any = [
        {"role": "user", "content": TEXT["text"]},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "drawn"},
    ]
    second = client.responses.create(model="tiny", input=said, tools=given["tools"], max_output_tokens=8)
    assert second.status in {"completed", "incomplete"}
    messages: Any = [
        said[0],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": "draw", "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "drawn"},
    ]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    chat = client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[{"type": "function", "function": function}],
        max_tokens=8,  # type: ignore[list-item]
    )
    assert second.output_text == (chat.choices[0].message.content or "")
