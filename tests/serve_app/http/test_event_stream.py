"""Streams that are silent for long: comments keep their connections, and change nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from starlette.types import Message

from epd.errors import UnavailableError
from epd.serve_app.http.answers.answer_response import EventStream
from tests.serve_app.conftest import QUESTION, Front
from tests.serve_app.fakes import WORDS, FakeService
from tests.serve_app.server import NEVER_S, wait_until

COMMENT = ": keep-alive"


def blocks(text: str) -> list[str]:
    return text.split("\n\n")[:-1]


def test_comments_come_before_the_first_token_and_between_tokens(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(word_s=0.35), keep_alive_s=0.1)
    seen = blocks(front.ask(stream=True).text)
    first_word = next(index for index, block in enumerate(seen) if WORDS[0] in block)
    assert seen[0] == COMMENT
    assert COMMENT in seen[first_word:]
    assert seen[-1] == "data: [DONE]"
    assert all(block == COMMENT or block.startswith("data: ") for block in seen)


def test_a_lively_stream_has_none(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(words=("word ",) * 20, word_s=0.03), keep_alive_s=NEVER_S)
    assert COMMENT not in front.ask(stream=True).text


def test_the_official_client_does_not_notice(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(word_s=0.15), keep_alive_s=0.05)
    stream = front.openai.chat.completions.create(model="shapes-vl", stream=True, **QUESTION)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "".join(WORDS)


def test_an_error_after_a_comment_is_the_last_event(
    run_front: Callable[..., Front], caplog: pytest.LogCaptureFixture
) -> None:
    """The status had to be said by then; the log has the true one."""
    caplog.set_level("INFO", "epd.serve_app")
    front = run_front(FakeService(error=UnavailableError("all gone"), word_s=0.3), keep_alive_s=0.1)
    response = front.ask(stream=True)
    assert response.status_code == 200
    *comments, last = blocks(response.text)
    assert set(comments) == {COMMENT}
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "all gone"
    wait_until(lambda: "status=503 error=UnavailableError" in caplog.text)


def test_an_error_before_any_comment_has_its_status(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(error=UnavailableError("all gone")), keep_alive_s=NEVER_S)
    assert front.ask(stream=True).status_code == 503


def test_nothing_is_sent_into_an_event_or_after_the_end() -> None:
    """A receiver that takes long for a message gets the next one when it has taken it."""
    busy, messages = [], []

    async def send(message: Message) -> None:
        assert not busy
        busy.append(message)
        await asyncio.sleep(0.03)
        messages.append(message)
        busy.clear()

    async def run() -> None:
        async with EventStream(send, 0.02) as stream:
            for _ in range(5):
                await asyncio.sleep(0.03)
                await stream.write(b"data: x\n\n")
            await stream.end()
        await asyncio.sleep(0.1)

    asyncio.run(run())
    assert [message["type"] for message in messages].count("http.response.start") == 1
    assert messages[0]["type"] == "http.response.start"
    bodies = [message["body"] for message in messages[1:]]
    assert bodies.count(b"data: x\n\n") == 5
    assert b": keep-alive\n\n" in bodies
    assert bodies[-1] == b""
