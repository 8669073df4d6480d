"""Tokens that are ready together are sent in one ASGI message, an event each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from epd.serve_app.http.api import ApiSettings, create_api
from epd.serve_app.service import AnswerEnd, AnswerItem, AnswerRequest, StageSpan, TokenDelta
from epd.types import StageTimings, Usage
from tests.serve_app.conftest import Front
from tests.serve_app.fakes import FakeService

END = AnswerEnd(Usage(0, 0, 4, 4, 0), StageTimings(total_s=0.5))
SPAN = StageSpan("decode", "d0", 1.0, 2.0)


@dataclass
class Batches(FakeService):
    """Answers with these items, each batch at once."""

    batches: Sequence[Sequence[AnswerItem]] = field(default=())

    async def _answer(self, request: AnswerRequest) -> AsyncGenerator[Sequence[AnswerItem], None]:  # noqa: ARG002
        for batch in self.batches:
            await asyncio.sleep(0)
            yield batch


class NoMedia:
    num_spooled_bytes = num_downloads = 0

    @asynccontextmanager
    async def sources(self, request_id: str, references: Any) -> AsyncIterator[tuple[()]]:  # noqa: ARG002
        yield ()


def delta(text: str, reason: Any = None) -> TokenDelta:
    return TokenDelta(0, text, (1,), (), reason)


def bodies_of(batches: Sequence[Sequence[AnswerItem]]) -> list[bytes]:
    """The bodies of the messages of a stream, without empty ones."""
    data = json.dumps({"messages": [{"role": "user", "content": "?"}], "stream": True}).encode()
    sent: list[bytes] = []

    async def scenario() -> None:
        asked = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Any:
            return asked.pop() if asked else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                sent.append(message["body"])

        service: Any = Batches(batches=batches)
        media: Any = NoMedia()
        app = create_api(service, media, ApiSettings(allowed_hosts=None))
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        await app({**scope, "headers": headers, "client": None, "server": None}, receive, send)
        app.state.server.close()

    asyncio.run(scenario())
    return sent


def events_of(body: bytes) -> list[str]:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    read = [json.loads(line)["choices"][0]["delta"].get("content") for line in lines if line != b"[DONE]"]
    return [text for text in read if text]


def test_a_batch_is_one_message_of_whole_events() -> None:
    first, second, last = bodies_of([[delta("a")], [delta("b"), delta("c"), delta("d", "stop"), END]])
    assert events_of(first) == ["a"]
    assert events_of(second) == ["b", "c"]
    assert events_of(last) == ["d"]


def test_the_bytes_are_those_of_one_item_at_a_time() -> None:
    items = [delta("a"), delta(""), delta("b"), SPAN, delta("c", "stop"), END]
    together, apart = (b"".join(bodies_of(batches)) for batches in ([items], [[item] for item in items]))
    assert [*map(without_numbers, together.split(b"\n\n"))] == [*map(without_numbers, apart.split(b"\n\n"))]


def without_numbers(event: bytes) -> Any:
    """An event without what differs between two requests."""
    if not event.startswith(b"data: {"):
        return event
    read = json.loads(event.removeprefix(b"data: "))
    return {name: value for name, value in read.items() if name not in {"id", "created", "epd"}}


@pytest.mark.parametrize("streams", [True, False])
def test_the_service_knows_whether_somebody_reads_tokens_as_they_come(front: Front, *, streams: bool) -> None:
    assert front.ask(stream=streams).status_code == 200
    body = {"prompt": "x", "stream": streams}
    assert front.http.post("/v1/completions", json=body).status_code == 200
    assert [request.streams for request in front.service.requests] == [streams, streams]
