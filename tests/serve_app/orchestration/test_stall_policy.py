"""When nothing comes of an attempt: whether it waits for its turn or has stalled, told as stories."""

from __future__ import annotations

from epd.serve_app.orchestration.watchdog import MAX_TURN, Watched, stalled

TIMEOUT_S = 100.0


def watched(name: str, event_s: float, *workers: str) -> Watched:
    return Watched(name, frozenset(workers), event_s)


def test_a_silent_attempt_at_silent_workers_has_stalled() -> None:
    attempts = [watched("a", 0.0, "p0"), watched("b", 50.0, "p0")]
    assert stalled(attempts, {"p0": 0.0}, 100.0, TIMEOUT_S) == []
    assert stalled(attempts, {"p0": 0.0}, 101.0, TIMEOUT_S) == ["a"]
    assert stalled(attempts, {}, 151.0, TIMEOUT_S) == ["a", "b"]


def test_an_attempt_waits_for_its_turn_while_a_worker_that_has_it_does_other_work() -> None:
    queued = [watched("a", 0.0, "p0")]
    assert stalled(queued, {"p0": 450.0}, 500.0, TIMEOUT_S) == []
    behind_groups = [watched("a", 0.0, "p0", "e0")]
    assert stalled(behind_groups, {"p0": 0.0, "e0": 450.0}, 500.0, TIMEOUT_S) == []
    assert stalled(queued, {"p0": 0.0, "e0": 450.0}, 500.0, TIMEOUT_S) == ["a"]


def test_no_turn_takes_for_ever() -> None:
    late_s = MAX_TURN * TIMEOUT_S
    assert stalled([watched("a", 0.0, "p0")], {"p0": late_s}, late_s, TIMEOUT_S) == []
    assert stalled([watched("a", 0.0, "p0")], {"p0": late_s}, late_s + 1, TIMEOUT_S) == ["a"]
