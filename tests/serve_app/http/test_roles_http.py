"""Roles over HTTP: what status, metrics and load tell of them, and how they are changed by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd.errors import InfeasibleError, UnavailableError
from tests.serve_app.conftest import ADMIN, Front
from tests.serve_app.fakes import SWITCH, FakeService


def test_status_tells_of_switches_and_decisions(front: Front) -> None:
    status = front.http.get("/v1/epd/status").json()
    (switch,) = status["switches"]
    assert (switch["worker"], switch["before"], switch["after"]) == ("e1", "e", "d")
    assert (switch["migrate_s"], switch["weights_s"], switch["num_moved"]) == (0.2, 0.1, 2)
    assert [each["verdict"] for each in status["decisions"]] == ["switch", "no gain"]
    assert status["decisions"][0]["reason"].startswith("e1: e to d")
    assert status["advice"]["Stage"]["num_replicas"] == 4
    assert status["advice"]["Stage"]["reason"] == "4 of 3 to 8 replicas: why"
    assert status["num_waiting"] == 2
    assert not any(worker["is_switching"] for worker in status["workers"])


def test_a_worker_is_given_other_roles(front: Front) -> None:
    front.service.switched.clear()
    reply = front.http.post("/v1/epd/roles", json={"worker": "e1", "roles": ["decode"]}, headers=ADMIN)
    assert reply.status_code == 200
    assert reply.json()["onload_s"] == SWITCH.onload_s
    assert front.service.switched == [("e1", frozenset({"decode"}))]


@pytest.mark.parametrize(
    "body",
    [
        {"worker": "e1", "roles": []},
        {"worker": "e1", "roles": ["video"]},
        {"worker": "e1"},
        {"worker": "e1", "roles": ["decode"], "more": 1},
        [],
    ],
)
def test_roles_that_make_no_sense_are_refused(front: Front, body: object) -> None:
    front.service.switched.clear()
    reply = front.http.post("/v1/epd/roles", json=body, headers=ADMIN)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("invalid request body: ")
    assert front.service.switched == []


@pytest.mark.parametrize(
    ("error", "status"), [(InfeasibleError("too few"), 422), (UnavailableError("rolled back"), 503)]
)
def test_a_switch_that_does_not_work_is_told(
    run_front: Callable[..., Front], error: Exception, status: int
) -> None:
    front = run_front(FakeService(switch_error=error), admin_api_key="the admin's")  # type: ignore[arg-type]
    reply = front.http.post("/v1/epd/roles", json={"worker": "e1", "roles": ["decode"]}, headers=ADMIN)
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == str(error)


def test_roles_need_the_key(run_front: Callable[..., Front]) -> None:
    front = run_front(api_key="other", admin_api_key="secret")
    body = {"worker": "e1", "roles": ["decode"]}
    assert front.http.post("/v1/epd/roles", json=body).status_code == 401
    assert front.http.get("/v1/epd/load").status_code == 401
    assert front.service.switched == []
    with_key = {"Authorization": "Bearer secret"}
    assert front.http.post("/v1/epd/roles", json=body, headers=with_key).status_code == 200


def test_the_load_of_the_last_minutes_is_told(front: Front) -> None:
    first, second = front.http.get("/v1/epd/load").json()["requests"]
    assert (first["num_patches"], first["num_prompt_tokens"], first["max_tokens"]) == (256, 100, 32)
    assert 59 < first["age_s"] - second["age_s"] < 61


def test_metrics_tell_where_the_time_of_switches_went(front: Front) -> None:
    lines = front.http.get("/metrics").text.splitlines()
    assert 'epd_role_switch_total{kind="e->d",outcome="done"} 1.0' in lines
    assert 'epd_role_switch_total{kind="e->d",outcome="rolled_back"} 0.0' in lines
    assert 'epd_role_switch_seconds_total{kind="e->d",phase="migrate"} 0.2' in lines
    assert 'epd_role_switch_seconds_total{kind="e->d",phase="onload"} 0.125' in lines
    assert "epd_queue_length 2.0" in lines
