"""Chat requests below the framework's routing: every response is that of the routed endpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from epd.errors import OverloadedError, UnavailableError
from epd.serve_app.http.guard import http_guard
from epd.serve_app.observability.record import RequestRecord
from tests.serve_app.conftest import ADMIN, QUESTION, Front
from tests.serve_app.fakes import FakeService

PATH = "/v1/chat/completions"
KEYS = {"api_key": "the key", "admin_api_key": "the admin's"}
RIGHT = {"authorization": "Bearer the key"}
VARIES = re.compile(
    r'chatcmpl-\w+|"(created|ttft_s|total_s)":[\d.e-]+|^(date|server-timing): .*$', re.MULTILINE
)

CASES: dict[str, dict[str, Any]] = {
    "an answer": {"json": QUESTION, "headers": RIGHT},
    "a stream": {"json": {**QUESTION, "stream": True}, "headers": RIGHT},
    "the admin's": {"json": {**QUESTION, "priority": -1}, "headers": ADMIN},
    "no admin": {"json": {**QUESTION, "priority": -1}, "headers": RIGHT},
    "no key": {"json": QUESTION},
    "another key": {"json": QUESTION, "headers": {"authorization": "Bearer x"}},
    "no JSON": {"content": b"{", "headers": {**RIGHT, "content-type": "application/json"}},
    "another type": {"content": b"a=1", "headers": {**RIGHT, "content-type": "text/plain"}},
    "another model": {"json": {**QUESTION, "model": "x"}, "headers": RIGHT},
    "another host": {"json": QUESTION, "headers": {**RIGHT, "host": "evil.example"}},
}


def shown(response: httpx.Response) -> str:
    """A response without what differs between two of them."""
    headers = "\n".join(f"{name}: {value}" for name, value in sorted(response.headers.items()))
    lengths = re.sub(r"^content-length: \d+$", "", headers, flags=re.MULTILINE)
    return VARIES.sub("", f"{response.status_code}\n{lengths}\n{response.text}")


def both_ways(front: Front, monkeypatch: pytest.MonkeyPatch, **request: Any) -> tuple[str, str]:
    direct = shown(front.http.post(PATH, **request))
    with monkeypatch.context() as patch:
        app_for = http_guard.RequestEdge._app_for
        patch.setattr(
            http_guard.RequestEdge,
            "_app_for",
            lambda *args: app_for(*args[:2], RequestRecord(is_answer=False)),
        )
        routed = shown(front.http.post(PATH, **request))
    return direct, routed


@pytest.mark.parametrize("name", CASES)
def test_a_response_is_that_of_the_route(
    name: str, run_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, routed = both_ways(
        run_front(**KEYS, allowed_hosts=frozenset({"localhost"})), monkeypatch, **CASES[name]
    )
    assert direct == routed


@pytest.mark.parametrize(
    "error", [OverloadedError("busy", 2.5), UnavailableError("gone"), ValueError("a bug")]
)
def test_an_error_of_the_service_is_that_of_the_route(
    error: Exception,
    run_front: Callable[..., Front],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct, routed = both_ways(run_front(FakeService(error=error)), monkeypatch, json=QUESTION)
    assert direct == routed
    assert direct.startswith(("429", "503", "500"))


def test_other_methods_are_the_route_s(run_front: Callable[..., Front]) -> None:
    front = run_front()
    assert front.http.get(PATH).status_code == 405
    assert front.http.post(f"{PATH}/", json=QUESTION).status_code in (307, 404)
