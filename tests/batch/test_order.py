"""The order of media keeps three stages busy."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from epd.batch.in_flight import CostModel, StageSeconds, busy_order, in_busy_order, johnson_order, makespan_s
from epd.batch.line_index import LineGroup


def test_makespan_of_two_jobs_by_hand() -> None:
    # decode   | 2 | 1 |
    # encode       | 1 |1|
    # language         | 3   | 2  |
    assert makespan_s([StageSeconds(2, 1, 3), StageSeconds(1, 1, 2)]) == 8
    assert makespan_s([StageSeconds(1, 1, 2), StageSeconds(2, 1, 3)]) == 7
    assert makespan_s([]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_two_stages_end_as_early_as_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [(rng.uniform(0, 3), rng.uniform(0, 3)) for _ in range(6)]

    def end_s(order: list[int]) -> float:
        return makespan_s(StageSeconds(jobs[place][0], 0.0, jobs[place][1]) for place in order)

    best_s = min(end_s(list(order)) for order in permutations(range(6)))
    assert end_s(johnson_order(jobs)) == pytest.approx(best_s)


def test_three_stages_end_near_the_best_and_never_later_than_as_given() -> None:
    ratios = []
    for seed in range(30):
        rng = random.Random(seed)
        jobs = [StageSeconds(*(rng.uniform(0, 3) for _ in range(3))) for _ in range(6)]
        order = busy_order(jobs)
        assert sorted(order) == list(range(6))
        ours_s = makespan_s([jobs[place] for place in order])
        assert ours_s <= makespan_s(jobs)
        ratios.append(ours_s / min(makespan_s(each) for each in permutations(jobs)))
    assert sum(ratios) / len(ratios) < 1.05


def test_a_long_video_with_few_questions_does_not_make_the_others_wait() -> None:
    long, short = LineGroup(1, 1, 10**9, True), LineGroup(2, 500, 10**6, True)
    assert list(in_busy_order(iter([long, short]), CostModel())) == [short, long]


def test_costs_are_learnt() -> None:
    costs = CostModel()
    costs.learn({"decode": 10.0, "encode": 5.0, "language": 4.0}, num_bytes=1000, num_lines=8)
    assert costs.estimate(LineGroup(1, 2, 100, True)) == StageSeconds(1.0, 0.5, 1.0)
    costs.learn({}, num_bytes=0, num_lines=0)
    assert costs.estimate(LineGroup(1, 2, 100, True)) == StageSeconds(1.0, 0.5, 1.0)


def test_groups_come_in_chunks_and_none_is_lost() -> None:
    groups = [LineGroup(number, 1 + number % 7, 1000 * (number % 5), True) for number in range(1, 101)]
    ordered = list(in_busy_order(iter(groups), CostModel(), chunk=8))
    assert sorted(group.first for group in ordered) == list(range(1, 101))
    assert {group.first for group in ordered[:8]} == set(range(1, 9))
