"""Utilisation: how busy stages were, in few samples."""

from __future__ import annotations

import pytest

from epd.batch.utilisation import Utilisation


def test_shares_count_from_the_first_answer_on() -> None:
    utilisation = Utilisation()
    assert utilisation.shares(1.0, {"decode": 1.0}) == {}
    utilisation.mark_warm(10.0, {"decode": 5.0})
    utilisation.mark_warm(12.0, {"decode": 7.0})
    assert utilisation.shares(20.0, {"decode": 13.0, "encode": 1.0}) == {"decode": 0.8, "encode": 0.1}


def test_samples_stay_few_and_add_up_to_all_that_was_done() -> None:
    utilisation = Utilisation(max_samples=16)
    for tick in range(1001):
        utilisation.add(tick / 10, {"decode": tick / 20})
    assert len(utilisation.samples) <= 16
    steps = utilisation.steps()
    assert all(shares["decode"] == pytest.approx(0.5) for _, shares in steps)
    assert utilisation.samples[0].time_s == 0
    assert utilisation.samples[-1].time_s > 80
    assert utilisation.recent(100.0, {"decode": 50.0})["decode"] == pytest.approx(0.5)
