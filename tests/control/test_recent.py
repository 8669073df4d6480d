"""The pace of work, as measured of late."""

from __future__ import annotations

import pytest

from epd.control.recent import Pace


def test_nothing_is_known_before_the_first_work() -> None:
    assert Pace().seconds(10, 0.0) is None


def test_work_takes_what_such_work_took() -> None:
    pace = Pace()
    pace.add(100, 5.0, 7.0)
    assert pace.seconds(50, 7.0) == pytest.approx(1.0)
    assert pace.seconds(50, 1e9) == pytest.approx(1.0)


def test_work_at_once_counts_together() -> None:
    """Four readers of a disk, each a quarter of its speed."""
    pace = Pace()
    for number in range(4):
        pace.add(1, 0.0, 1.0 + number / 1000)
    assert pace.seconds(4, 1.0) == pytest.approx(1.0, rel=0.01)


def test_late_work_counts_for_more() -> None:
    pace = Pace(memory_s=10.0)
    pace.add(1, 0.0, 1.0)
    pace.add(1, 100.0, 105.0)
    assert pace.seconds(1, 105.0) == pytest.approx(5.0, rel=0.01)


def test_a_pace_is_forgotten() -> None:
    """So that what was slow is tried again."""
    pace = Pace(forget_s=60.0)
    pace.add(1, 0.0, 100.0)
    assert pace.seconds(1, 159.0) == pytest.approx(100.0)
    assert pace.seconds(1, 161.0) is None
    pace.add(1, 200.0, 201.0)
    assert pace.seconds(1, 201.0) == pytest.approx(1.0)
