"""Who is to blame for lost workers, told as stories; and that random losses hardly ever blame anybody."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Sequence

import pytest

from epd.control.loss_policy import LossLedger, LossLimits, LossReport, Suspect
from epd.errors import PoisonedRequestError, http_status

_numbers = itertools.count()


def lost(*names: str, place: str = "prefill", num_tokens: int = 0) -> list[Suspect]:
    return [Suspect(name, place, num_tokens) for name in names]


def blamed(ledger: LossLedger, now_s: float, *names: str) -> set[str]:
    """Which of the names are refused."""
    found = set()
    for name in names:
        try:
            ledger.check(name, now_s)
        except PoisonedRequestError:
            found.add(name)
    return found


def record(
    ledger: LossLedger,
    suspects: Sequence[Suspect],
    now_s: float,
    worker: str = "",
    *,
    is_at_risk: bool = True,
) -> set[str]:
    """Records the loss of a worker, by default of another one each time. Returns who is to blame now."""
    ledger.record(suspects, now_s, worker or f"w{next(_numbers)}", is_at_risk=is_at_risk)
    return blamed(ledger, now_s, *(each.fingerprint for each in suspects))


def test_a_request_that_is_alone_twice_is_to_blame_and_refused_for_a_while() -> None:
    ledger = LossLedger()
    assert record(ledger, lost("poison"), 0.0) == set()
    ledger.check("poison", 1.0)
    assert record(ledger, lost("poison"), 1.0) == {"poison"}
    with pytest.raises(PoisonedRequestError, match=r"lost 2 times .* next 590 s") as caught:
        ledger.check("poison", 11.0)
    assert http_status(caught.value) == 422
    ledger.check("another", 11.0)
    ledger.check("poison", 601.0)
    assert len(ledger) == 0


def test_one_among_others_is_isolated_after_two_losses_and_blamed_when_it_is_lost_alone() -> None:
    ledger = LossLedger()
    for at_s in (0.0, 1.0):
        assert record(ledger, lost("poison", "a", "b"), at_s) == frozenset()
    assert ledger.suspected_at("poison", 1.0) == ledger.suspected_at("a", 1.0) == {"prefill"}
    ledger.forget("a", 1.5)  # it was answered when it was alone
    assert ledger.suspected_at("a", 1.0) == frozenset()
    assert record(ledger, lost("poison"), 2.0) == {"poison"}
    ledger.check("a", 2.0)
    ledger.check("b", 2.0)


def test_who_was_in_company_stays_so_when_the_company_is_answered() -> None:
    ledger = LossLedger()
    for at_s in (0.0, 1.0):
        record(ledger, lost("a", "b"), at_s)
    ledger.forget("a", 2.0)
    assert not blamed(ledger, 3.0, "a", "b")
    assert ledger.suspected_at("b", 3.0) == {"prefill"}


def test_copies_of_one_request_are_one_suspect() -> None:
    ledger = LossLedger()
    assert not record(ledger, lost("poison", "poison", "poison"), 0.0)
    assert record(ledger, lost("poison", "poison"), 1.0) == {"poison"}


def test_losses_of_different_stages_are_not_added_up() -> None:
    ledger = LossLedger()
    for place in ("encode", "prefill", "decode"):
        assert record(ledger, lost("unlucky", place=place), 0.0) == frozenset()
    assert ledger.suspected_at("unlucky", 0.0) == frozenset()


def test_an_answer_that_gets_further_each_time_is_not_to_blame() -> None:
    ledger = LossLedger()
    for num_tokens in (10, 30, 60, 100):
        assert not record(ledger, lost("unlucky", place="decode", num_tokens=num_tokens), 0.0)
    assert ledger.furthest("unlucky", 0.0) == 100


def test_an_answer_that_ends_its_worker_at_one_token_is_to_blame() -> None:
    """Reports of the last tokens may be lost with the worker."""
    ledger = LossLedger()
    assert not record(ledger, lost("poison", place="decode", num_tokens=41), 0.0)
    assert record(ledger, lost("poison", place="decode", num_tokens=43), 0.0) == {"poison"}


def test_the_tables_are_bounded() -> None:
    limits = LossLimits(max_suspects=4, max_remembered=3)
    ledger = LossLedger(limits)
    assert not record(ledger, lost(*"abcdefgh"), 0.0)
    assert len(ledger) == 4
    for number in range(100):
        record(ledger, lost(f"r{number}"), float(number))
        ledger.forget(f"r{number}", number + 0.5)
    assert len(ledger._own) == 3
    others = {f"f{number}": reported(lost(f"q{number}"), 100.0) for number in range(100)}
    assert ledger.follow(others, 100.0)
    assert len(ledger._others) == 64
    ledger.record(lost("late"), 1000.0, "w")
    assert len(ledger) == 1
    assert not ledger._answered
    assert not ledger._others


def test_suspects_beyond_the_bound_are_company() -> None:
    ledger = LossLedger(LossLimits(max_suspects=1))
    for at_s in (0.0, 1.0, 2.0):
        assert not record(ledger, lost("a", "b"), at_s)


def test_random_losses_hardly_ever_blame_a_request() -> None:
    """300 workers lost at random, each with 0 to 6 of 12 requests; each request sees 4 losses."""
    rng = random.Random(4)
    ledger, accused = LossLedger(), set[str]()
    for number in range(300):
        present = rng.sample([f"r{number * 3 + each}" for each in range(12)], rng.randint(0, 6))
        place = rng.choice(("encode", "prefill", "decode"))
        suspects = [Suspect(name, place, rng.randint(0, 150) * (place == "decode")) for name in present]
        accused |= record(ledger, suspects, 2.0 * number)
    assert len(accused) <= 9  # of about 900, 1 %: most are lost once at most


# Several fronts over the same workers


def reported(
    suspects: Sequence[Suspect], now_s: float, worker: str = "w", *, is_at_risk: bool = True
) -> LossReport:
    ledger = LossLedger()
    ledger.record(suspects, now_s, worker, is_at_risk=is_at_risk)
    return ledger.report()


def fronts(num_fronts: int = 2) -> list[LossLedger]:
    ledgers = [LossLedger() for _ in range(num_fronts)]
    for ledger in ledgers:
        ledger.is_shared = True
    return ledgers


def share(ledgers: Sequence[LossLedger], now_s: float) -> None:
    """Each front gets the reports of the others, as the board carries them."""
    reports = {f"f{number}": ledger.report() for number, ledger in enumerate(ledgers)}
    for number, ledger in enumerate(ledgers):
        others = {front: report for front, report in reports.items() if front != f"f{number}"}
        ledger.follow(pickle.loads(pickle.dumps(others)), now_s)


def test_losses_at_each_front_are_added_up() -> None:
    """A client that sends the same request to one front after the other gets no further than at one."""
    ledgers = fronts(3)
    ledgers[0].record(lost("poison"), 0.0, "p0/1")
    share(ledgers, 0.5)
    assert not blamed(ledgers[1], 0.5, "poison")
    ledgers[1].record(lost("poison"), 1.0, "p0/2")
    share(ledgers, 1.5)
    for ledger in ledgers:
        assert ledger.undecided_s("poison", 1.5) == pytest.approx(1.5)
        assert not blamed(ledger, 1.5, "poison")
        assert blamed(ledger, 3.0, "poison") == {"poison"}
        assert not blamed(ledger, 601.0, "poison")


def test_who_is_alone_at_its_own_front_only_is_not_to_blame() -> None:
    """Both fronts had one request at the worker, twice: one of them is innocent. Then one is lost alone."""
    ledgers = fronts()
    for number, at_s in enumerate((0.0, 1.0)):
        ledgers[0].record(lost("poison"), at_s, f"p0/{number}")
        ledgers[1].record(lost("innocent"), at_s + 0.2, f"p0/{number}")
        share(ledgers, at_s + 0.5)
    for ledger in ledgers:
        assert not blamed(ledger, 10.0, "poison", "innocent")
        assert ledger.suspected_at("innocent", 10.0) == ledger.suspected_at("poison", 10.0) == {"prefill"}
    ledgers[0].record(lost("poison"), 11.0, "p0/2")
    share(ledgers, 11.5)
    for ledger in ledgers:
        assert blamed(ledger, 13.5, "poison", "innocent") == {"poison"}


def test_nobody_is_blamed_before_others_could_report() -> None:
    ledger, other = fronts()
    for number in range(2):
        ledger.record(lost("innocent"), float(number), f"p0/{number}")
    assert ledger.undecided_s("innocent", 1.2) > 1.0
    ledger.check("innocent", 1.2)
    other.record(lost("poison"), 1.1, "p0/1")
    share([ledger, other], 1.4)
    assert ledger.undecided_s("innocent", 1.4) == 0.0
    ledger.check("innocent", 10.0)


def test_those_at_risk_at_one_front_excuse_those_present_at_another() -> None:
    ledgers = fronts()
    for number in range(2):
        ledgers[0].record(lost("poison"), float(number), f"d0/{number}")
        ledgers[1].record(
            lost("streams", place="decode", num_tokens=9), number + 0.1, f"d0/{number}", is_at_risk=False
        )
        share(ledgers, number + 0.2)
    for ledger in ledgers:
        assert blamed(ledger, 5.0, "poison", "streams") == {"poison"}
        assert ledger.suspected_at("streams", 5.0) == frozenset()


def test_what_one_front_has_answered_all_forget() -> None:
    ledgers = fronts()
    ledgers[0].record(lost("unlucky"), 0.0, "p0/1")
    share(ledgers, 0.5)
    ledgers[1].forget("unlucky", 1.0)
    share(ledgers, 1.5)
    assert [len(ledger) for ledger in ledgers] == [0, 0]
    ledgers[0].record(lost("unlucky"), 2.0, "p0/2")
    share(ledgers, 2.5)
    assert not blamed(ledgers[1], 10.0, "unlucky")


def test_fronts_whose_clocks_differ_exchange_ages() -> None:
    """One is an hour ahead: what it reports has happened just now here too."""
    ahead, behind = fronts()
    for number in range(2):
        ahead.record(lost("poison"), 3600.0 + number, f"p0/{number}")
    behind.follow({"ahead": ahead.report().shifted(-3601.5).shifted(1.5)}, 1.5)
    assert behind.undecided_s("poison", 1.5) == pytest.approx(1.5)
    assert blamed(behind, 3.5, "poison") == {"poison"}
    assert not blamed(behind, 602.0, "poison")


def test_losses_of_a_front_that_is_gone_are_remembered() -> None:
    gone, other = fronts()
    gone.record(lost("poison"), 0.0, "p0/1")
    assert other.follow({"gone": gone.report()}, 0.5)
    assert not other.follow({}, 1.0)
    other.is_shared = False
    assert record(other, lost("poison"), 2.0) == {"poison"}


def test_a_report_is_small_whatever_was_lost() -> None:
    ledger = LossLedger()
    for number in range(150):
        ledger.record(lost(*(f"{number}-{each}" * 4 for each in range(20))), float(number), f"p0/{number}")
        ledger.forget(f"{number}-0" * 4, number + 0.5)
    report = ledger.report()
    assert len(report.losses) == 16
    assert all(len(each.suspects) == 8 and each.has_more for each in report.losses)
    assert len(pickle.dumps(report)) < 20_000
