"""Clients by a file of keys: who may do what, how often, and that rotation and changes need no restart."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from epd.errors import RateLimitExceededError, RequestError
from epd.serve_app import clients
from epd.serve_app.app_args import AppArgs
from epd.serve_app.clients import KeysFile, hash_of
from epd.serve_app.files.settings import FileSettings
from epd.serve_app.http.guard import keyed_clients
from epd.serve_app.http.guard.keyed_clients import Quota
from tests.serve_app.conftest import QUESTION, Front
from tests.serve_app.server import wait_until

RunFront = Callable[..., Front]


LINE = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": QUESTION})


def line(key: str, name: str, **options: Any) -> str:
    return json.dumps({"name": name, "sha256": hash_of(key.encode()), **options})


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the file of keys, which is looked at for every request."""
    monkeypatch.setattr(clients, "_LOOK_S", 0.0)

    def write(*lines: str) -> Path:
        part = tmp_path / "keys.part"
        part.write_text("\n".join(lines) + "\n")
        return part.replace(tmp_path / "keys.jsonl")

    return write


def sent(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(front: Front, key: str, **more: Any) -> httpx.Response:
    return front.http.post("/v1/chat/completions", json={**QUESTION, **more}, headers=sent(key))


def upload(front: Front, key: str) -> httpx.Response:
    files = {"file": ("a.jsonl", io.BytesIO(LINE.encode()))}
    return front.http.post("/v1/files", headers=sent(key), files=files, data={"purpose": "batch"})


def test_refusals_are_worded_as_openai_words_them(run_front: RunFront, keys: Callable[..., Path]) -> None:
    front = run_front(api_keys_file=keys(line("k1", "ann", rights=["files"])))
    missing, wrong = front.ask(), ask(front, "k2")
    for refused, words in ((missing, "You didn't provide an API key"), (wrong, "Incorrect API key provided")):
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["message"].startswith(words)
        assert refused.json()["error"]["code"] == "invalid_api_key"
    refused = ask(front, "k1")
    assert refused.status_code == 403
    assert "insufficient permissions" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "missing_scope"
    assert front.service.requests == []


ROUTES = {
    "ask": [
        ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"),
        ("POST", "/invocations"), ("POST", "/tokenize"), ("POST", "/v1/epd/estimate"),
        ("POST", "/v1/epd/picture"),
    ],
    "files": [("GET", "/v1/files"), ("POST", "/v1/files"), ("POST", "/v1/uploads")],
    "batches": [("GET", "/v1/batches"), ("POST", "/v1/batches")],
    "admin": [("POST", "/v1/epd/roles")],
}  # fmt: skip


@pytest.mark.parametrize("right", ROUTES)
def test_each_route_wants_its_right_and_no_other(
    run_front: RunFront, keys: Callable[..., Path], tmp_path: Path, right: str
) -> None:
    others = sorted(ROUTES.keys() - {right})
    file = keys(line("has", "ann", rights=[right]), line("lacks", "ben", rights=others))
    front = run_front(api_keys_file=file, files=FileSettings(tmp_path / "files"))
    for method, path in ROUTES[right]:
        assert front.http.request(method, path, headers=sent("lacks"), json={}).status_code == 403, path
        assert front.http.request(method, path, headers=sent("has"), json={}).status_code != 403, path
    for key in ("has", "lacks"):
        assert front.http.get("/v1/models", headers=sent(key)).status_code == 200


def test_requests_of_a_minute_are_counted_and_said(
    run_front: RunFront, keys: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed_clients, "monotonic", lambda: 1000.0)
    file = keys(line("k1", "ann", requests_per_minute=2), line("k2", "ben"))
    front = run_front(api_keys_file=file)
    first, second, third = (ask(front, "k1") for _ in range(3))
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)] == [
        "1", "0", "0",
    ]  # fmt: skip
    assert third.status_code == 429
    assert int(third.headers["retry-after"]) == 30
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    other = ask(front, "k2")
    assert other.status_code == 200
    assert not [name for name in other.headers if "ratelimit" in name]
    limits = front.http.get("/v1/models", headers=sent("k1")).json()["data"][0]["limits"]
    assert (limits["requests_per_minute"], limits["tokens_per_minute"]) == (2, None)


def test_tokens_are_counted_once_an_answer_ends(run_front: RunFront, keys: Callable[..., Path]) -> None:
    front = run_front(api_keys_file=keys(line("k1", "ann", tokens_per_minute=1)))
    answered = ask(front, "k1")
    used = answered.json()["usage"]["total_tokens"]
    assert answered.status_code == 200
    assert used > 1
    wait_until(lambda: f'epd_client_tokens_total{{client="ann"}} {used}.0' in metrics(front))
    assert ask(front, "k1").status_code == 429
    wait_until(lambda: 'epd_client_requests_total{client="ann",status="429"} 1.0' in metrics(front))


def metrics(front: Front) -> str:
    return front.http.get("/metrics").text


def test_what_was_used_comes_back_steadily() -> None:
    quota = Quota(60, 600, now_s=0.0)
    for _ in range(60):
        quota.admit(0.0)
    with pytest.raises(RateLimitExceededError) as refused:
        quota.admit(0.5)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    quota.admit(1.0)
    quota.spend(700, 2.0)
    with pytest.raises(RateLimitExceededError) as refused:
        quota.admit(2.0)
    assert refused.value.retry_after_s == pytest.approx(10.1)
    assert quota.headers(2.0)["x-ratelimit-remaining-tokens"] == "0"
    quota.admit(12.2)


def test_a_rotated_key_keeps_files_and_names_and_an_old_one_ends(
    run_front: RunFront, keys: Callable[..., Path], tmp_path: Path
) -> None:
    old, other = line("old", "ann"), line("k2", "ben")
    settings = {"api_keys_file": keys(old, other), "files": FileSettings(tmp_path / "files")}
    front = run_front(**settings)
    file_id = upload(front, "old").json()["id"]
    keys(old, line("new", "ann"), other)
    for key, found in (("old", 200), ("new", 200), ("k2", 404)):
        assert front.http.get(f"/v1/files/{file_id}", headers=sent(key)).status_code == found
    keys(line("new", "ann"), other)
    assert front.http.get(f"/v1/files/{file_id}", headers=sent("old")).status_code == 401
    assert front.http.delete(f"/v1/files/{file_id}", headers=sent("new")).status_code == 200


def test_lines_of_a_batch_have_its_owners_weight_and_wait_for_no_minute(
    run_front: RunFront, keys: Callable[..., Path], tmp_path: Path
) -> None:
    file = keys(line("k1", "ann", requests_per_minute=1, weight=4))
    front = run_front(api_keys_file=file, files=FileSettings(tmp_path / "files"))
    assert ask(front, "k1").status_code == 200
    asked = {
        "input_file_id": upload(front, "k1").json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch_id = front.http.post("/v1/batches", json=asked, headers=sent("k1")).json()["id"]

    def batch() -> dict[str, Any]:
        found: dict[str, Any] = front.http.get(f"/v1/batches/{batch_id}", headers=sent("k1")).json()
        return found

    wait_until(lambda: batch()["status"] == "completed")
    assert batch()["request_counts"]["completed"] == 1
    assert [each.weight for each in front.service.requests] == [4, 4]
    wait_until(lambda: 'epd_client_requests_total{client="ann",status="200"} 2.0' in metrics(front))


def test_a_key_ends_when_it_says(keys: Callable[..., Path]) -> None:
    soon, before = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, -1))
    file = keys(
        line("k1", "ann", expires=soon.isoformat()),
        line("k2", "ann", expires=before.isoformat()),
        line("k3", "ann", expires=f"{before:%Y-%m-%dT%H:%M:%S}"),
    )
    found = KeysFile(file)
    assert found.find(b"k1") is not None
    assert found.find(b"k2") is found.find(b"k3") is None


def test_a_broken_change_leaves_the_keys_as_they_were(
    keys: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = keys(line("k1", "ann"))
    found = KeysFile(path)
    with caplog.at_level(logging.WARNING):
        keys('{"name": "ann"}')
        assert found.find(b"k1") is not None
        assert found.find(b"k1") is not None
    assert len([each for each in caplog.records if each.name == clients.__name__]) == 1
    assert "line 1: sha256: Field required" in caplog.text
    path.unlink()
    assert found.find(b"k1") is not None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1: the line: Invalid JSON"),
        (['{"name": "a b", "sha256": ""}'], "line 1: name"),
        ([line("k", "a"), line("k", "b")], "line 2: received 'b' with a key of an earlier line"),
        ([line("k", "a"), line("l", "a", requests_per_minute=1)], "line 2: received 'a' with"),
        ([line("k", "a", right=["ask"])], "line 1: right: Extra inputs"),
        ([line("k", "a", rights=[])], "line 1: rights"),
    ],
)
def test_what_is_no_file_of_keys(keys: Callable[..., Path], lines: list[str], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        AppArgs(api_keys_file=keys(*lines)).resolved()
    assert words in str(refused.value)


def test_a_key_and_a_file_of_keys_exclude_each_other(keys: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match="an api_key and an api_keys_file"):
        AppArgs(api_key=SecretStr("k"), api_keys_file=keys(line("k", "a"))).resolved()


def test_a_client_has_its_priority(run_front: RunFront, keys: Callable[..., Path]) -> None:
    front = run_front(api_keys_file=keys(line("k1", "ann", priority=-5)))
    assert ask(front, "k1").status_code == 200
    assert ask(front, "k1", priority=-5).status_code == 200
    assert ask(front, "k1", priority=3).status_code == 200
    assert ask(front, "k1", priority=-6).status_code == 403
    assert [each.priority for each in front.service.requests] == [-5, -5, 3]


def test_a_client_has_its_weight(run_front: RunFront, keys: Callable[..., Path]) -> None:
    front = run_front(api_keys_file=keys(line("k1", "ann", weight=4), line("k2", "ben")))
    for key in ("k1", "k2"):
        assert ask(front, key).status_code == 200
    assert [each.weight for each in front.service.requests] == [4, 1]


@pytest.mark.parametrize("weight", [0, 101, 1.5])
def test_weights_have_limits(keys: Callable[..., Path], weight: float) -> None:
    with pytest.raises(RequestError, match="line 1: weight: "):
        KeysFile(keys(line("k1", "ann", weight=weight)))
