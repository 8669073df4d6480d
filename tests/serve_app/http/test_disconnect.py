"""A client that goes away frees everything, whatever is being done for it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from epd.control.routing import Router
from epd.serve_app.http.requests.chat_request import ChatRequest
from epd.serve_app.http.requests.request_parsing import conversation
from epd.serve_app.http.server_state import ApiSettings, ParsedRequest, ServerState
from epd.serve_app.media.fleet_media import FleetMedia
from epd.serve_app.observability.record import RequestRecord
from tests.serve_app.conftest import JSON, QUESTION, Front, data_url, image_part, media_settings
from tests.serve_app.fakes import FakeService
from tests.serve_app.media_fleet import MediaFleet
from tests.serve_app.server import wait_until

HOURS = 3600.0


def ask_and_leave(front: Front, body: JSON) -> None:
    """A client that leaves once the service has its question."""
    host, port = front.server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n"
    with socket.create_connection((host, int(port)), timeout=200) as sock:
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        wait_until(lambda: len(front.service.requests) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_word(run_front: Callable[..., Front], media: dict[str, Path], stream: bool) -> None:
    front = run_front(FakeService(word_s=HOURS))
    part = image_part(data_url(media["image"], "image/png"))
    ask_and_leave(front, {"messages": [{"role": "user", "content": [part]}], "stream": stream})
    wait_until(lambda: front.service.num_closed == 1)
    front.wait_until_empty()


def test_in_the_middle_of_a_stream(run_front: Callable[..., Front]) -> None:
    service = FakeService(holds_after=2)
    front = run_front(service)
    with front.http.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert front.server.front.num_requests == 1
    wait_until(lambda: service.num_closed == 1)
    front.wait_until_empty()


def test_the_official_client_closes_its_stream(run_front: Callable[..., Front]) -> None:
    front = run_front(FakeService(holds_after=2))
    stream = front.openai.chat.completions.create(model="shapes-vl", stream=True, **QUESTION)  # type: ignore[call-overload]
    next(iter(stream))
    stream.close()
    wait_until(lambda: front.service.num_closed == 1)


def test_a_client_that_left_is_in_log_and_metrics(
    run_front: Callable[..., Front], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "epd.serve_app")
    front = run_front(FakeService(word_s=HOURS))
    ask_and_leave(front, QUESTION)
    wait_until(lambda: "status=499 error=disconnected" in caplog.text)
    counted = 'epd_requests_total{status="499",stream="false"} 1.0'
    wait_until(lambda: counted in front.http.get("/metrics").text)


def test_others_do_not_notice(run_front: Callable[..., Front]) -> None:
    front = run_front(service := FakeService(holds_after=2))
    with front.http.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as stays:
        lines = stays.iter_lines()
        next(lines)
        with httpx.stream(
            "POST",
            f"{front.server.url}/v1/chat/completions",
            json={**QUESTION, "stream": True},
            trust_env=False,
            timeout=200,
        ) as leaves:
            next(leaves.iter_lines())
        wait_until(lambda: service.num_closed == 1)
        service.may_go_on.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    front.wait_until_empty()


def test_an_answer_is_closed_between_two_of_its_items(tmp_path: Path) -> None:
    """As when a client goes away while a piece is being sent to it."""
    service = FakeService()
    fleet = MediaFleet(media_settings(spool_folder=tmp_path))
    front = ServerState(service, FleetMedia(fleet, Router()), ApiSettings())

    async def leave_early() -> None:
        chat = ChatRequest.model_validate(QUESTION)
        parsed = ParsedRequest(chat, *conversation(chat.messages))
        items = front.items(parsed, RequestRecord(model="shapes-vl"))
        await anext(items)
        await items.aclose()
        assert (service.num_open, service.num_closed, front.num_requests) == (1, 1, 0)

    asyncio.run(leave_early())
    front.close()
    fleet.close()
