"""Asks the whole application by the official client, for cases that vLLM's tests have too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion

from epd.models import embedded_model_path
from tests.serve_app.conftest import JSON
from tests.serve_app.real_app import RealApp, real_app

Client = Callable[..., Any]
TEXT: JSON = {
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the opposite of big?"},
    ]
}


@contextmanager
def embedded_app() -> Iterator[RealApp]:
    """Serves the embedded model, an encoder, a prefill and a decode worker, none of which may be lost."""
    with real_app(embedded_model_path(), "1e1p1d") as running:
        yield running
        running.wait_until_empty()
        assert running.num_workers_lost == 0


@contextmanager
def official_client(app: RealApp) -> Iterator[OpenAI]:
    with (
        httpx.Client(trust_env=False, timeout=200) as http,
        OpenAI(base_url=f"{app.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


@contextmanager
def chat_completions(app: RealApp) -> Iterator[Client]:
    """Yields what asks for chat completions; fields that the client does not know go into extra_body."""
    with official_client(app) as client:
        yield lambda **body: client.chat.completions.create(**{"model": "tiny", "temperature": 0, **body})


def content(completion: ChatCompletion) -> str:
    found = completion.choices[0].message.content
    assert found is not None
    return found


def streamed(chunks: Any) -> tuple[str, list[str], list[Any]]:
    """Returns the text, the reasons of ends and the deltas of a stream of one choice, which ends it."""
    choices = [chunk.choices[0] for chunk in chunks]
    deltas = [choice.delta for choice in choices]
    assert choices[-1].finish_reason
    assert {delta.role for delta in deltas} <= {"assistant", None}
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    return "".join(delta.content or "" for delta in deltas), reasons, deltas


def refused(create: Client, *words: str, **body: Any) -> None:
    """Checks that a request is a 400 whose message has the words, and that the next one is answered."""
    with pytest.raises(openai.BadRequestError) as caught:
        create(**{**TEXT, **body})
    assert caught.value.status_code == 400
    assert all(word in caught.value.message for word in words), caught.value.message
    assert create(**TEXT, max_completion_tokens=1).choices[0].message.content is not None
