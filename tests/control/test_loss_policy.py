"""Who is to blame for lost workers, told as stories; and that random losses hardly ever blame anybody."""

from __future__ import annotations

import random

import pytest

from epd.control.loss_policy import LossLedger, LossLimits, Suspect
from epd.errors import PoisonedRequestError, http_status


def lost(*names: str, place: str = "prefill", num_tokens: int = 0) -> list[Suspect]:
    return [Suspect(name, place, num_tokens) for name in names]


def test_a_request_that_is_alone_twice_is_to_blame_and_refused_for_a_while() -> None:
    ledger = LossLedger()
    assert ledger.record(lost("poison"), 0.0) == frozenset()
    ledger.check("poison", 1.0)
    assert ledger.record(lost("poison"), 1.0) == {"poison"}
    with pytest.raises(PoisonedRequestError, match=r"lost 2 times .* next 590 s") as caught:
        ledger.check("poison", 11.0)
    assert http_status(caught.value) == 422
    ledger.check("another", 11.0)
    ledger.check("poison", 601.0)
    assert len(ledger) == 0


def test_one_among_others_is_isolated_after_two_losses_and_blamed_when_it_is_lost_alone() -> None:
    ledger = LossLedger()
    for at_s in (0.0, 1.0):
        assert ledger.record(lost("poison", "a", "b"), at_s) == frozenset()
    assert ledger.suspected_at("poison", 1.0) == ledger.suspected_at("a", 1.0) == {"prefill"}
    ledger.forget("a")  # it was answered when it was alone
    assert ledger.suspected_at("a", 1.0) == frozenset()
    assert ledger.record(lost("poison"), 2.0) == {"poison"}
    ledger.check("a", 2.0)
    ledger.check("b", 2.0)


def test_copies_of_one_request_are_one_suspect() -> None:
    ledger = LossLedger()
    ledger.record(lost("poison", "poison", "poison"), 0.0)
    assert ledger.record(lost("poison", "poison"), 1.0) == {"poison"}


def test_losses_of_different_stages_are_not_added_up() -> None:
    ledger = LossLedger()
    for place in ("encode", "prefill", "decode"):
        assert ledger.record(lost("unlucky", place=place), 0.0) == frozenset()
    assert ledger.suspected_at("unlucky", 0.0) == frozenset()


def test_an_answer_that_gets_further_each_time_is_not_to_blame() -> None:
    ledger = LossLedger()
    for num_tokens in (10, 30, 60, 100):
        assert not ledger.record(lost("unlucky", place="decode", num_tokens=num_tokens), 0.0)
    assert ledger.furthest("unlucky", 0.0) == 100


def test_an_answer_that_ends_its_worker_at_one_token_is_to_blame() -> None:
    """Reports of the last tokens may be lost with the worker."""
    ledger = LossLedger()
    assert not ledger.record(lost("poison", place="decode", num_tokens=41), 0.0)
    assert ledger.record(lost("poison", place="decode", num_tokens=43), 0.0) == {"poison"}


def test_the_table_is_bounded() -> None:
    ledger = LossLedger(LossLimits(max_requests=4))
    assert not ledger.record(lost(*"abcdefgh"), 0.0)
    assert len(ledger) == 4


def test_random_losses_hardly_ever_blame_a_request() -> None:
    """300 workers lost at random, each with 0 to 6 of 12 requests; each request sees 4 losses."""
    rng = random.Random(4)
    ledger, blamed = LossLedger(), set[str]()
    for number in range(300):
        present = rng.sample([f"r{number * 3 + each}" for each in range(12)], rng.randint(0, 6))
        place = rng.choice(("encode", "prefill", "decode"))
        suspects = [Suspect(name, place, rng.randint(0, 150) * (place == "decode")) for name in present]
        blamed |= ledger.record(suspects, 2.0 * number)
    assert len(blamed) <= 9  # of about 900, 1 %: most are lost once at most
