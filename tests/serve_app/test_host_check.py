"""A server without a key answers only to its own names, and takes no request of another site's page."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from epd.errors import RequestError
from serve_app.host_check import served_hosts
from tests.serve_app.conftest import QUESTION, Front

NAMES = frozenset({"video.example", ".inner.example"})


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LocalHost:8000", "epd.localhost:1", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3",
        "video.example", "VIDEO.example.:8000", "a.inner.example",
    ],
)  # fmt: skip
def test_own_names_and_addresses_are_answered(run_front: Callable[..., Front], host: str) -> None:
    front = run_front(allowed_hosts=NAMES)
    assert front.http.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "xvideo.example",
        "video.example.evil",
        "inner.example",
        "localhost.evil",
        "evillocalhost",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics"])
def test_other_names_are_not(run_front: Callable[..., Front], host: str, path: str) -> None:
    front = run_front(allowed_hosts=NAMES)
    response = front.http.get(path, headers={"host": host})
    assert response.status_code == 403
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("permission_error", "host_forbidden")
    assert "--allowed-host" in error["message"]


def test_a_foreign_name_asks_nothing(run_front: Callable[..., Front]) -> None:
    front = run_front(allowed_hosts=NAMES)
    headers = {"host": "evil.example"}
    assert front.http.post("/v1/chat/completions", json=QUESTION, headers=headers).status_code == 403
    assert front.service.requests == []


@pytest.mark.parametrize(
    ("bound", "has_key", "extra", "expected"),
    [
        ("127.0.0.1", False, (), {"127.0.0.1"}),
        ("localhost", False, (), {"localhost"}),
        ("::1", False, ("My.Example.",), {"::1", "my.example"}),
        ("127.0.0.1", True, (), None),
        ("0.0.0.0", False, (), None),
        ("10.0.0.1", False, (), None),
        ("0.0.0.0", True, (".example",), {"0.0.0.0", ".example"}),
    ],
)
def test_which_names_a_server_has(
    bound: str, has_key: bool, extra: tuple[str, ...], expected: set[str] | None
) -> None:
    assert served_hosts(bound, has_key=has_key, extra=extra) == expected


@pytest.mark.parametrize("name", ["", ".", "http://x", "x:80", "*.x", "a,b"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(RequestError, match="without scheme and port"):
        served_hosts("127.0.0.1", has_key=False, extra=(name,))


def test_a_page_of_another_site_cannot_ask_without_a_content_type(front: Front) -> None:
    """A Blob without a type is sent to other sites without asking them first; browsers add their origin."""
    content = json.dumps(QUESTION)
    plain = front.http.post("/v1/chat/completions", content=content)
    assert plain.status_code == 200
    foreign = front.http.post(
        "/v1/chat/completions", content=content, headers={"origin": "http://evil.example"}
    )
    assert foreign.status_code == 400
    assert len(front.service.requests) == 1
