"""Intervals and p-values against figures worked out by hand or published."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from epd.eval.rows import mcnemar_p, wilson_interval


@pytest.mark.parametrize(
    ("num_right", "num_all", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_intervals_are_the_published_ones(num_right: int, num_all: int, low: float, high: float) -> None:
    interval = wilson_interval(num_right, num_all)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_intervals_mirror_and_hold_the_share() -> None:
    for num_right in range(31):
        interval, mirrored = wilson_interval(num_right, 30), wilson_interval(30 - num_right, 30)
        assert 0 <= interval.low <= num_right / 30 <= interval.high <= 1
        assert interval.low == pytest.approx(1 - mirrored.high)


@pytest.mark.parametrize(("num_right", "num_all"), [(0, 0), (3, 2), (-1, 5)])
def test_an_interval_of_nothing_is_refused(num_right: int, num_all: int) -> None:
    with pytest.raises(ValueError, match=f"{num_right} of {num_all}"):
        wilson_interval(num_right, num_all)


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (0, 5, 2 / 32),
        (5, 0, 2 / 32),
        (1, 6, 2 * (1 + 7) / 128),
        (2, 8, 2 * (1 + 10 + 45) / 1024),
        (7, 7, 1.0),
        (0, 2000, 0.0),
    ],
)
def test_p_values_are_those_of_fair_coins(wins: int, losses: int, p_value: float) -> None:
    assert mcnemar_p(wins, losses) == pytest.approx(p_value, rel=1e-12, abs=1e-300)


def test_p_values_equal_counting_every_outcome() -> None:
    """Of all ways in which n coins can fall, the share that is at least as uneven as what was seen."""
    for num_coins in range(1, 9):
        sums = [sum(sides) for sides in product((0, 1), repeat=num_coins)]
        for wins in range(num_coins + 1):
            seen = abs(2 * wins - num_coins)
            as_uneven = sum(abs(2 * heads - num_coins) >= seen for heads in sums)
            expected = float(Fraction(as_uneven, len(sums)))
            assert mcnemar_p(wins, num_coins - wins) == pytest.approx(expected)
