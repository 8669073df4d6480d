"""What would have to be true for DistServe's rows of table 7: each assumption at one rate."""

from __future__ import annotations

import pytest

from benchmarks.published.table7 import FITTED_ROWS
from benchmarks.published.table7_study import (
    ASSUMPTIONS,
    COPY_S,
    Assumption,
    by_chance,
    copied_share,
    in_turns,
)
from benchmarks.published.tables import TABLE_7


@pytest.mark.parametrize(
    ("name", "error"), [("slower", 0.11), ("turns", 0.27), ("chance", -0.14), ("copies", -0.17)]
)
def test_the_share_at_one_request_a_second(name: str, error: float) -> None:
    assumption = ASSUMPTIONS[name]
    assert assumption.system == "DistServe"
    assert assumption.share(1.0) / TABLE_7["DistServe"][1.0] - 1 == pytest.approx(error, abs=0.006)


def test_copies_are_fitted_to_the_named_row_and_may_be_longer() -> None:
    (rate,) = [rate for system, rate in FITTED_ROWS if system == "DistServe"]
    shares = [copied_share("DistServe", copy_s, rate) for copy_s in (0.0018, COPY_S, 0.003)]
    assert shares == [shares[0]] * 3
    assert shares[0] / TABLE_7["DistServe"][rate] == pytest.approx(1, abs=0.01)
    assert copied_share("DistServe", 0.001, rate) > 1.05 * shares[0]


def test_copies_of_single_clips_delay_no_answer_of_epd_too_much() -> None:
    alone, copied, longer = (copied_share("EPD", copy_s, 0.5) for copy_s in (0.0, COPY_S, 0.006))
    assert alone == copied
    assert longer < copied - 0.1


def test_goodput_is_the_highest_rate_with_the_share() -> None:
    found = Assumption("line", "DistServe", lambda rate: 1 - 0.2 * rate).goodput()
    assert 0.49 < found <= 0.5


def test_requests_are_assigned_to_all_workers() -> None:
    assert in_turns(7, 0) == [0, 1, 2, 0, 1, 2, 0]
    assert by_chance(50, 1) == by_chance(50, 1) != by_chance(50, 2)
    assert set(by_chance(50, 1)) == {0, 1, 2}
