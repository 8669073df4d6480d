"""Requests as Open WebUI sends them to a server: the key's check, its list of models, a chat, a chat's title.

They are those of `backend/open_webui/routers/openai.py` in its commit 004a45f5. Before a chat it sends
nothing but GET /models, no ping. OPTIONS comes only from a browser, for a connection of one user's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.serve_app.conftest import JSON, Front, data_url, image_part

# What its page lets people set for a model, by the names that it sends.
SET: JSON = {
    "temperature": 0.5, "top_p": 0.9, "min_p": 0.05, "max_tokens": 16, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "seed": 7, "stop": ["END"], "logit_bias": {"5": 3},
    "response_format": {"type": "text"},
}  # fmt: skip


def test_each_model_of_its_list_answers(front: Front) -> None:
    models = front.http.get("/v1/models", headers={"Authorization": "Bearer none"}).json()["data"]
    assert models
    assert {front.ask(model=model["id"]).status_code for model in models} == {200}


def test_a_chat_about_a_picture_is_streamed_with_its_usage(front: Front, tmp_path: Path) -> None:
    """The text comes before its pictures, and earlier answers are sent back as they are shown."""
    picture = tmp_path / "picture.png"
    Image.new("RGB", (56, 56), "red").save(picture)
    parts = [{"type": "text", "text": "What is shown?"}, image_part(data_url(picture, "image/png"))]
    first = {"role": "user", "content": parts}
    answered = {"role": "assistant", "content": "A circle."}
    messages = [first, answered, {"role": "user", "content": "And its colour?"}]
    reply = front.ask(messages=messages, stream=True, stream_options={"include_usage": True}, **SET)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    *texts, last = [json.loads(event) for event in events[:-1]]
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in texts)
    assert last["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "gif"])
def test_pictures_of_each_kind_that_it_sends_are_read(front: Front, tmp_path: Path, kind: str) -> None:
    picture = tmp_path / f"picture.{kind}"
    Image.new("RGB", (56, 56), "red").save(picture)
    assert front.ask_about(image_part(data_url(picture, f"image/{kind}"))).status_code == 200


def test_a_last_part_may_be_marked_for_a_cache(front: Front) -> None:
    part = {"type": "text", "text": "What colour?", "cache_control": {"type": "ephemeral"}}
    reply = front.ask({"messages": [{"role": "user", "content": [part]}]}, stream=True)
    assert reply.text.endswith("data: [DONE]\n\n")


def test_a_wrong_key_is_told_in_json_which_it_shows(run_front: Callable[..., Front]) -> None:
    front = run_front(api_key="sesame")
    wrong, right = (
        front.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) for key in ("none", "sesame")
    )
    assert (wrong.status_code, right.status_code) == (401, 200)
    assert wrong.json()["error"]["message"]


def test_another_sites_page_may_not_ask_from_a_browser(front: Front) -> None:
    """So the connection is made in the settings of the administrator: its server asks, no browser."""
    asked = {"Origin": "http://127.0.0.1:3000", "Access-Control-Request-Method": "GET"}
    reply = front.http.options("/v1/models", headers=asked)
    assert [name for name in reply.headers if name.startswith("access-control-")] == []


def test_a_title_is_asked_for_without_a_stream(front: Front) -> None:
    task = [{"role": "user", "content": "### Task:\nGenerate a concise title for the chat."}]
    reply = front.ask(messages=task, stream=False, max_completion_tokens=1000)
    assert reply.json()["choices"][0]["message"]["content"]


def test_a_longer_thought_is_refused_by_name(front: Front) -> None:
    """It sends the second in the place of the first."""
    assert "reasoning_effort" in front.ask(reasoning_effort="high").json()["error"]["message"]
    assert "reasoning" in front.ask(reasoning={"effort": "high"}).json()["error"]["message"]
