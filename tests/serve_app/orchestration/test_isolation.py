"""Suspects are kept apart from all other requests, at their own front and at others over the same workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from epd.control.routing import InFlight
from epd.serve_app.orchestration.isolation import Isolation
from tests.serve_app.orchestration.parts import shared_parts

PREFILL = "prefill"
WORKERS = ("p0", "p1")


class Front:
    """An isolation over attempts that are placed by hand."""

    def __init__(self, owner: str = "front") -> None:
        self.now_s = 1000.0
        dispatcher = SimpleNamespace(groups_at=lambda _worker: [])
        shared = shared_parts(dispatcher=dispatcher, clock=lambda: self.now_s)
        self.router = shared.router
        self.attempts: dict[str, Any] = shared.requests.attempts
        self.isolation = Isolation(shared, owner)
        self.num_published = 0
        self.isolation.on_claimed = self._publish

    def _publish(self) -> None:
        self.num_published += 1

    def attempt(self, name: str, *, is_suspect: bool = False, at: str = "") -> Any:
        self.attempts[name] = SimpleNamespace(
            id=name,
            isolated_at=frozenset({PREFILL} if is_suspect else ()),
            undecided_until_s=0.0,
            is_at_risk=True,
            is_at=lambda worker: worker == at,
        )
        return self.attempts[name]

    def allowed(self, attempt: Any) -> list[str]:
        return self.isolation.allowed(attempt, PREFILL, WORKERS)


def test_a_suspect_gets_a_worker_of_its_own() -> None:
    front = Front()
    suspect, other = front.attempt("s", is_suspect=True), front.attempt("o")
    assert front.allowed(suspect) == ["p0"]
    assert front.allowed(other) == ["p1"]
    assert front.num_published == 1
    suspect.is_at_risk = False
    assert front.isolation.claims == ()
    assert front.allowed(other) == ["p0", "p1"]


def test_a_suspect_waits_for_those_that_are_there() -> None:
    front = Front()
    suspect, there = front.attempt("s", is_suspect=True), front.attempt("o", at="p0")
    assert front.allowed(suspect) == []
    there.is_at_risk = False
    assert front.allowed(suspect) == ["p0"]


def test_nothing_is_placed_while_the_blame_is_undecided() -> None:
    front = Front()
    attempt = front.attempt("s")
    attempt.undecided_until_s = front.now_s + 2.0
    assert front.allowed(attempt) == []
    front.now_s += 2.0
    assert front.allowed(attempt) == ["p0", "p1"]


def test_other_fronts_keep_off_a_claimed_worker_for_a_while() -> None:
    front, other = Front(), Front()
    front.isolation.share({"other": ()})
    assert front.allowed(front.attempt("s", is_suspect=True)) == []  # nobody knows of the claim yet
    other.isolation.share({"front": front.isolation.claims})
    assert other.allowed(other.attempt("o")) == ["p1"]
    other.now_s += 31.0  # its front is gone, or hangs
    other.isolation.share({"front": front.isolation.claims})
    assert other.allowed(other.attempt("o")) == ["p0", "p1"]


def test_a_suspect_waits_until_others_know_and_have_nothing_there() -> None:
    front = Front()
    front.isolation.share({"other": ()})
    suspect = front.attempt("s", is_suspect=True)
    front.router.set_reported("p0", InFlight(num_prefills=1))
    assert front.allowed(suspect) == []
    front.now_s += 1.0
    assert front.allowed(suspect) == []
    front.router.set_reported("p0", InFlight(num_decodes=1))
    assert front.allowed(suspect) == ["p0"]


def test_of_two_claims_that_of_the_lesser_id_holds() -> None:
    """Both were made before either front knew of the other's. Their clocks differ by an hour."""
    first, second = Front("a"), Front("b")
    second.now_s += 3600.0
    first.isolation.share({"b": ()})
    second.isolation.share({"a": ()})
    suspects = [front.attempt("s", is_suspect=True) for front in (first, second)]
    for front, suspect in zip((first, second), suspects, strict=True):
        assert front.isolation.allowed(suspect, PREFILL, ["p0"]) == []
    claims = [front.isolation.claims for front in (first, second)]
    first.isolation.share({"b": claims[1]})
    second.isolation.share({"a": claims[0]})
    for front in (first, second):
        front.now_s += 2.0
    assert first.isolation.allowed(suspects[0], PREFILL, ["p0"]) == ["p0"]
    assert second.isolation.allowed(suspects[1], PREFILL, ["p0"]) == []
    assert second.allowed(suspects[1]) == []  # claims the other worker, of which nobody knows yet
    second.now_s += 1.0
    assert second.allowed(suspects[1]) == ["p1"]
