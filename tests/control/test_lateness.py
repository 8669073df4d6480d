"""A look that is late: its time counts against nobody."""

from __future__ import annotations

import math

from epd.machine import Looks, excused


def test_a_look_is_late_by_what_goes_beyond_the_time_between_looks() -> None:
    looks = Looks(2.0, 100.0)
    assert [looks.late_s(now_s) for now_s in (102.0, 105.0, 106.0, 166.0, 168.0)] == [0, 1, 0, 58, 0]


def test_the_first_look_is_never_late_where_none_was_before() -> None:
    looks = Looks(2.0, math.inf)
    assert [looks.late_s(now_s) for now_s in (1e9, 1e9 + 2, 1e9 + 9)] == [0, 0, 5]


def test_what_was_heard_after_the_stop_is_not_moved_ahead_of_now() -> None:
    assert excused(40.0, 58.0, 166.0) == 98.0
    assert excused(165.0, 58.0, 166.0) == 166.0
