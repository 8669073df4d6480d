"""A server without a key answers only to its own names, and takes no request of another site's page."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from epd.errors import RequestError
from epd.serve_app.http.address import HostCheck
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
    assert "--allowed-hosts" in error["message"]


def test_a_foreign_name_asks_nothing(run_front: Callable[..., Front]) -> None:
    front = run_front(allowed_hosts=NAMES)
    headers = {"host": "evil.example"}
    assert front.http.post("/v1/chat/completions", json=QUESTION, headers=headers).status_code == 403
    assert front.service.requests == []


@pytest.mark.parametrize(
    ("address", "has_key", "names", "host", "is_allowed"),
    [
        ("127.0.0.1", False, None, "evil.example", False),  # rebinding, however the server was started
        ("::1", False, None, "evil.example:80", False),
        ("127.0.0.1", False, None, "localhost:8000", True),
        ("127.0.0.1", True, None, "evil.example", True),  # a page does not have the key
        ("10.0.0.1", False, None, "video.example", True),  # our names elsewhere are not known here
        ("10.0.0.1", False, {"video.example"}, "evil.example", False),
        ("10.0.0.1", True, {"video.example"}, "video.example", True),
    ],
)
def test_which_connections_may_use_which_names(
    address: str, has_key: bool, names: set[str] | None, host: str, is_allowed: bool
) -> None:
    scope = {"server": (address, 8000), "headers": [(b"host", host.encode())]}
    assert HostCheck(names, has_key=has_key).allows(scope) == is_allowed


def test_a_server_without_names_is_not_rebound(front: Front) -> None:
    """As `serve run` and `serve deploy` start it."""
    assert front.http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert front.http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("name", ["", ".", "http://x", "x:80", "*.x", "a,b"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(RequestError, match="without scheme and port"):
        HostCheck((name,))


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
