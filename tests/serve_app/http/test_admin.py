"""Who may change the service for others: roles and priorities above the default ask for the admin key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd.errors import RequestError
from epd.serve_app.app_args import AppArgs
from tests.serve_app.conftest import ADMIN, Front

ROLES = {"worker": "e1", "roles": ["decode"]}
KEYS = ({}, {"api_key": "user"}, {"admin_api_key": "admin"}, {"api_key": "user", "admin_api_key": "admin"})


def statuses(front: Front, key: str | None) -> tuple[int, int, int]:
    """Of a plain question, one that wants to come before others, and a change of roles."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    question = {"messages": [{"role": "user", "content": "x"}]}
    bodies = (question, {**question, "priority": -1})
    asked = [front.http.post("/v1/chat/completions", json=body, headers=headers) for body in bodies]
    switched = front.http.post("/v1/epd/roles", json=ROLES, headers=headers)
    first, second = (answer.status_code for answer in asked)
    return first, second, switched.status_code


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        (KEYS[0], None, (200, 403, 403)),
        (KEYS[0], "anything", (200, 403, 403)),
        (KEYS[1], None, (401, 401, 401)),
        (KEYS[1], "user", (200, 403, 403)),
        (KEYS[2], None, (200, 403, 403)),
        (KEYS[2], "admi", (200, 403, 403)),
        (KEYS[2], "admin", (200, 200, 200)),
        (KEYS[3], "user", (200, 403, 403)),
        (KEYS[3], "admin", (200, 200, 200)),
        (KEYS[3], "other", (401, 401, 401)),
    ],
)
def test_only_the_admin_key_gives_the_rights_of_an_admin(
    run_front: Callable[..., Front], keys: dict[str, str], key: str | None, expected: tuple[int, int, int]
) -> None:
    assert statuses(run_front(**keys), key) == expected


def test_the_refusal_says_what_to_do(front: Front) -> None:
    error = front.ask(priority=-(2**63)).json()["error"]
    assert error["message"].startswith("received a priority of -9223372036854775808; allowed: 0 and above, ")
    assert "--admin-api-key" in error["message"]
    assert (error["type"], error["code"]) == ("permission_error", "admin_right")
    assert front.service.requests == []


@pytest.mark.parametrize("priority", [0, 1, 2**63 - 1])
def test_anybody_may_come_later_than_others(front: Front, priority: int) -> None:
    assert front.ask(priority=priority).status_code == 200
    assert front.service.requests[0].priority == priority


def test_an_admin_may_come_before_others(front: Front) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "priority": -5}
    assert front.http.post("/v1/chat/completions", json=body, headers=ADMIN).status_code == 200
    assert front.service.requests[0].priority == -5


def test_one_key_for_users_and_admins_is_refused() -> None:
    with pytest.raises(RequestError, match="the same admin_api_key and api_key"):
        AppArgs.model_validate({"api_key": "one", "admin_api_key": "one"}).resolved()


def test_keys_are_not_shown(front: Front) -> None:
    assert "admin" not in repr(front.server.front.settings).replace("admin_api_key", "")
    assert "secret" not in repr(AppArgs.model_validate({"admin_api_key": "secret"}))
