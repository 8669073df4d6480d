"""One request at a time: what is measured, and what every failure is called.

Modules: `epd/bench/body.py`.
"""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.bench.body import chat_body
from epd.bench.client import AnswerError, ChatClient, ChatReply
from epd.client.body import MediaPart, SSEParser
from epd.client.endpoint import Endpoint, find_model, parse_endpoints
from epd.errors import RequestError
from epd.workload.requests import PlannedRequest, RequestShape
from tests.bench.conftest import VirtualTime
from tests.bench.fake_server import FakeServer
from tests.ports import kept_port

# Longer than any machine takes.
NEVER_S = 3600.0


def request(num_tokens: int = 5) -> PlannedRequest:
    return PlannedRequest(0, 0.0, RequestShape(12, num_tokens), media_seed=1, text_seed=2)


async def asked(
    url: str, *, num_tokens: int = 5, timeout_s: float = NEVER_S, key: str | None = None
) -> ChatReply:
    async with ChatClient(Endpoint("it", url, "fake", key), timeout_s=timeout_s) as client:
        return await client.ask(chat_body(request(num_tokens), [], "fake", {}))


def ask(url: str, **options: Any) -> ChatReply:
    return asyncio.run(asked(url, **options))


def test_times_are_those_of_the_server(virtual: VirtualTime) -> None:
    server = virtual.server(ttft_s=0.5, gap_s=0.25)
    reply = virtual.run(asked(server.url))
    assert reply.error is None
    times_s = [time_s - reply.sent_s for time_s in (*reply.token_times_s, reply.end_s)]
    assert times_s == pytest.approx([0.5, 0.75, 1.0, 1.25, 1.5, 1.5])
    assert (reply.prompt_tokens, reply.completion_tokens) == (7, 5)


def test_events_of_several_tokens_are_one_moment(server: FakeServer) -> None:
    server.behave(tokens_per_event=3)
    reply = ask(server.url, num_tokens=6)
    assert (len(reply.token_times_s), reply.completion_tokens) == (2, 6)


def test_a_server_that_does_not_count(server: FakeServer) -> None:
    server.behave(has_usage=False)
    reply = ask(server.url)
    assert (reply.error, reply.prompt_tokens, reply.completion_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("manner", "kind"),
    [
        ({"status": 429}, "HTTP 429"),
        ({"status": 500}, "HTTP 500"),
        ({"cut_after": 2}, "connection cut"),
        ({"error_after": 2}, "error in stream"),
        ({"is_garbage": True}, "malformed event"),
        ({"ttft_s": NEVER_S}, "timeout"),
        ({"gap_s": 0.3}, "timeout"),
    ],
)
def test_every_failure_has_a_name(server: FakeServer, manner: dict[str, object], kind: str) -> None:
    server.behave(**manner)
    reply = ask(server.url, timeout_s=0.5 if kind == "timeout" else NEVER_S)
    assert reply.error is not None
    assert reply.error.kind == kind
    assert reply.end_s - reply.sent_s < 0.5 * NEVER_S, "less than the slowest takes"


def test_why_a_server_refused_is_kept(server: FakeServer) -> None:
    server.behave(status=429)
    reply = ask(server.url)
    assert reply.error is not None
    assert "no room" in reply.error.detail


def test_nobody_there() -> None:
    with kept_port() as port:
        reply = ask(f"http://127.0.0.1:{port}")
    assert reply.error is not None
    assert reply.error.kind == "connection refused"


def test_the_key_is_sent_and_never_shown(server: FakeServer) -> None:
    assert ask(server.url, key="secret-1").error is None
    assert "authorization: bearer secret-1" in server.headers[0].lower()
    assert "secret-1" not in repr(Endpoint("it", server.url, "fake", "secret-1"))


# Bodies.


def test_media_come_before_the_question() -> None:
    media = [MediaPart("image/jpeg", b"AAAA"), MediaPart("video/mp4", b"BBBB")]
    body = chat_body(request(), media, "fake", {"top_k": 1, "temperature": 0.5})
    data = b"".join(body.pieces)
    record = json.loads(data)
    assert body.num_bytes == len(data)
    image, video, text = record["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}
    assert video == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,BBBB"}}
    assert len(text["text"].split()) == 12
    assert (record["top_k"], record["temperature"], record["max_tokens"]) == (1, 0.5, 5)
    assert record["stream_options"] == {"include_usage": True}


def test_a_question_without_media_is_plain_text() -> None:
    record = json.loads(b"".join(chat_body(request(), [], "fake", {}).pieces))
    assert isinstance(record["messages"][0]["content"], str)


# Events.

EVENTS = ['{"a": 1}', "[DONE]", "größer", "one\ntwo"]
STREAM = (
    ': ping\r\n\r\ndata: {"a": 1}\n\nevent: x\ndata:[DONE]\r\n\r\n'
    "data: größer\n\nid: 3\n\ndata: one\ndata: two\n\n"
).encode()


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(STREAM)]
    parser = SSEParser()
    pieces = [STREAM[start:stop] for start, stop in pairwise(ends)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


def test_an_answer_without_text_counts_from_its_end() -> None:
    reply = ChatReply(0.0)
    reply.take('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', 1.0)
    reply.take('{"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}', 2.0)
    reply.take('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}', 2.5)
    reply.take("[DONE]", 3.0)
    assert (reply.token_times_s, reply.completion_tokens, reply.is_finished) == ([2.0], 1, True)


@pytest.mark.parametrize("data", ["3", '{"choices": [3]}', '{"choices": 3}', '{"usage": [1]}', "{"])
def test_what_is_no_chunk_is_malformed(data: str) -> None:
    with pytest.raises(AnswerError, match="malformed"):
        ChatReply(0.0).take(data, 1.0)


# Endpoints.


def test_endpoints_have_names_and_no_v1() -> None:
    ours, other = parse_endpoints(["ours=http://127.0.0.1:8000/v1/", "https://user:pw@host/api"], api_key="k")
    assert (ours.name, ours.url, ours.api_key) == ("ours", "http://127.0.0.1:8000", "k")
    assert (other.name, other.shown_url) == ("host", "https://host/api")


@pytest.mark.parametrize(
    "texts",
    [
        ["ftp://x"], ["x"], ["a=http://"], ["a=http://x", "a=http://y"],
        ["http://[::1"], ["http://x:port"], ["http://x:99999"], ["http://@"],
    ],
)  # fmt: skip
def test_what_is_no_endpoint_is_refused(texts: list[str]) -> None:
    with pytest.raises(RequestError):
        parse_endpoints(texts)


@pytest.mark.parametrize("key", ["k\u00e9y", "two\nlines"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(RequestError, match="printable ASCII") as refused:
        parse_endpoints(["http://x"], api_key=key)
    assert key not in str(refused.value)


def test_the_model_is_asked_for(server: FakeServer) -> None:
    assert find_model(Endpoint("it", server.url)) == "fake"
    with kept_port() as port:
        for url in (f"{server.url}/elsewhere", f"http://127.0.0.1:{port}"):
            with pytest.raises(RequestError, match="/v1/models gave"):
                find_model(Endpoint("it", url))
