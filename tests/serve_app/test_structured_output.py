"""The whole application holds answers to formats, wherever they run, preempted, streamed or hostile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Literal

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from benchmarks.serving.structured import schema_row
from epd.models import embedded_model_path
from tests.serve_app.conftest import JSON
from tests.serve_app.real_app import RealApp, real_app

QUESTION: JSON = {"messages": [{"role": "user", "content": "Which shapes are there?"}], "seed": 5}
SCHEMA: JSON = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}, "note": {"type": "string", "maxLength": 12}},
    "required": ["shape", "note"],
    "additionalProperties": False,
}
DRAWN: JSON = {
    **QUESTION,
    "temperature": 1.5,
    "max_tokens": 200,
    "frequency_penalty": 0.4,
    "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
}
TOPOLOGIES = ("1epd",)


class Shape(BaseModel):
    """What a client of OpenAI's parses an answer into."""

    colour: Literal["red", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def app() -> Iterator[RealApp]:
    with real_app(embedded_model_path(), "1e1p1d") as running:
        yield running


@pytest.fixture
def client(app: RealApp) -> Iterator[OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=200) as http,
        OpenAI(base_url=f"{app.url}/v1", api_key="none", http_client=http, max_retries=0) as made,
    ):
        yield made


def test_drawn_schemas_get_valid_documents_from_preempted_answers() -> None:
    """`python -m benchmarks.serving.structured` draws 1,000."""
    row = schema_row(20, seed=7, num_kv_tokens=256)
    assert row["valid documents"] == 20
    assert row["preemptions"] > 0


def answer(app: RealApp, body: JSON) -> str:
    reply = app.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def test_every_topology_gives_the_same_document(app: RealApp) -> None:
    expected = answer(app, DRAWN)
    assert json.loads(expected).keys() == {"shape", "note"}
    for topology in TOPOLOGIES:
        with real_app(embedded_model_path(), topology) as other:
            assert answer(other, DRAWN) == expected, topology


def test_a_streamed_document_is_the_same(app: RealApp, client: OpenAI) -> None:
    body = {name: value for name, value in DRAWN.items() if name != "structured_outputs"}
    chunks = client.chat.completions.create(
        model="tiny", stream=True, extra_body={"structured_outputs": DRAWN["structured_outputs"]}, **body
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer(app, DRAWN)


def test_the_official_client_parses_an_answer(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", response_format=Shape, max_tokens=400, temperature=0.5, **QUESTION
    )
    assert isinstance(parsed.choices[0].message.parsed, Shape)


def test_the_official_client_parses_a_required_call(client: OpenAI) -> None:
    tool: JSON = {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}}
    choice = {"type": "function", "function": {"name": "draw"}}
    message = (
        client.chat.completions.create(
            model="tiny",
            tools=[tool],
            tool_choice=choice,
            max_tokens=400,
            temperature=1.5,
            **QUESTION,
        )
        .choices[0]
        .message
    )
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments).keys() == {"shape", "note"}
    assert message.content is None


def test_a_hostile_format_costs_its_request_alone(app: RealApp) -> None:
    hostile: list[JSON] = [
        {"json": {"type": "integer", "multipleOf": 99999989}},
        {"regex": "((.*a){40}(.*b){40}|(.*c){99}){50}x"},
    ]
    start_s = time.monotonic()
    for wanted in hostile:
        reply = app.http.post("/v1/chat/completions", json=DRAWN | {"structured_outputs": wanted})
        assert reply.status_code in (200, 400), reply.text
        assert reply.status_code == 200 or "received a" in reply.json()["error"]["message"]
    assert time.monotonic() - start_s < 120, "about 3 s where nothing else runs"
    assert json.loads(answer(app, DRAWN))
    assert app.num_workers_lost == 0
    app.wait_until_empty()
