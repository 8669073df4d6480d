"""A batch over several servers keeps all of them busy, also while some are lost and come back.

The driver and the HTTP backend are the real ones; servers and time are virtual.
"""

from __future__ import annotations

import pytest

from benchmarks.serving.batch_nodes import bound_s, run


@pytest.mark.parametrize(("num_lost", "most_again"), [(0, 1e-9), (4, 0.05)])
def test_a_run_ends_near_the_bound_of_the_slowest_stage(num_lost: int, most_again: float) -> None:
    """400 hours of video in parts of 5 to 15 minutes. Only what a lost node worked on is done again."""
    found = run(400, num_nodes=8, num_lost=num_lost)
    assert 0.9 < found.share <= 1 + 1e-9
    assert found.again <= most_again


def test_the_bound_counts_nodes_while_they_are_there_by_hand() -> None:
    losses = [(2.0, 0, True), (6.0, 0, False)]
    assert bound_s(3.0, 2, losses) == 1.5  # before the loss
    assert bound_s(7.0, 2, losses) == 5.0  # 2 x 2 s, then 3 s of one
    assert bound_s(12.0, 2, losses) == 8.0  # 2 x 2 s, 4 s of one, 2 x 2 s
