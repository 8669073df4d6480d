"""The latest requests of all fronts: the estimate of one is as if all of them had come to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.control.elasticity.cluster import StageSample, WorkerSample
from epd.control.elasticity.estimator import TrafficEstimator
from epd.control.recent import Arrivals, RequestWork, TrafficTotals

WORKS = st.builds(
    RequestWork,
    num_patches=st.integers(0, 5000),
    num_prompt_tokens=st.integers(1, 5000),
    max_tokens=st.integers(1, 500),
    expected_tokens=st.none() | st.integers(1, 500),
)


def totals_of(works: list[RequestWork]) -> TrafficTotals:
    totals = TrafficTotals()
    for work in works:
        totals = totals.plus(work)
    return totals


@given(st.lists(WORKS, max_size=20), st.lists(WORKS, max_size=20))
def test_what_came_in_between_has_the_same_number_and_work(
    before: list[RequestWork], new: list[RequestWork]
) -> None:
    first = totals_of(before)
    found = totals_of(before + new).since(first)
    assert totals_of(found) == totals_of(new)


def test_fewer_than_before_are_none() -> None:
    """A front's epoch is its own; totals of a front never shrink, and what does is not believed."""
    assert TrafficTotals().since(totals_of([RequestWork(1, 1, 1)])) == []


def worker(now_s: float) -> WorkerSample:
    """Encodes 1000 patches a second."""
    stages = {"encode": StageSample(done_units=1000 * now_s, num_rounds=int(now_s), busy_s=now_s)}
    return WorkerSample("e0", frozenset({"encode"}), 0.0, stages)


def test_the_leader_s_estimate_is_that_of_one_front() -> None:
    """Requests go to three fronts in turn; the leader sees the others once a second."""
    alone, leader = TrafficEstimator(), TrafficEstimator()
    arrivals, totals = Arrivals(), [TrafficTotals()] * 3
    arrivals.follow(0.0, {"a": totals[1], "b": totals[2]})
    for number in range(300):
        now_s = number / 5
        work = RequestWork(1000, 300, 20)
        alone.arrived(now_s, work)
        alone.finished(now_s)
        if number % 3:
            totals[number % 3] = replace(totals[number % 3].plus(work), num_finished=number)
        else:
            arrivals.arrived(now_s, work)
            arrivals.finished()
        if number % 5 == 4:
            arrivals.follow(now_s, {"a": totals[1], "b": totals[2]})
            leader.follow(now_s, arrivals)
            expected = alone.observe(now_s, [worker(now_s)])
            traffic = leader.observe(now_s, [worker(now_s)])
            if number > 10:
                assert traffic.arrival_rate == pytest.approx(expected.arrival_rate, rel=0.1)
                demand = expected.stages["encode"].demand
                assert traffic.stages["encode"].demand == pytest.approx(demand, rel=0.15)
    assert len(arrivals.recent(60.0)) == pytest.approx(300, abs=4)


def test_fronts_come_and_go() -> None:
    """What a front had before it was seen does not count, nor what one had that is gone."""
    arrivals = Arrivals()
    old = totals_of([RequestWork(0, 10, 10)] * 7)
    arrivals.follow(0.0, {"a": old})
    assert arrivals.recent(0.0) == ()
    arrivals.follow(1.0, {"a": old.plus(RequestWork(0, 10, 10))})
    assert len(arrivals.recent(1.0)) == 1
    arrivals.follow(2.0, {})
    arrivals.follow(3.0, {"b": TrafficTotals(num_waiting=4)})
    assert len(arrivals.recent(3.0)) == 1
    assert arrivals.num_waiting_elsewhere == 4


def test_recent_arrivals_are_kept_for_the_planner() -> None:
    arrivals = Arrivals(window_s=10.0)
    for second in range(20):
        arrivals.arrived(float(second), RequestWork(0, 10, 10))
    assert [at_s for at_s, _ in arrivals.recent(20.0)] == [float(second) for second in range(10, 20)]


def test_an_estimate_that_begins_later_counts_what_came_before() -> None:
    """Serve may begin to scale a deployment at any time."""
    arrivals, late = Arrivals(), TrafficEstimator()
    work = RequestWork(1000, 300, 20)
    for number in range(20):
        arrivals.arrived(number / 5, work)
    late.follow(4.0, arrivals)
    late.follow(4.0, arrivals)
    early = TrafficEstimator()
    for number in range(20):
        early.arrived(number / 5, work)
    assert late.observe(4.0, [worker(4.0)]) == early.observe(4.0, [worker(4.0)])


def test_other_fronts_see_new_totals_once_a_second() -> None:
    """A new one wakes whoever waits for a view."""
    arrivals = Arrivals()
    assert arrivals.published(0.0, 0) == TrafficTotals()
    arrivals.arrived(0.5, RequestWork(3, 10, 10))
    assert arrivals.published(0.9, 1) == TrafficTotals()
    assert arrivals.published(1.0, 1) == replace(totals_of([RequestWork(3, 10, 10)]), num_waiting=1)
