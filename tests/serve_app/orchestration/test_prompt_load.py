"""What prompts meet is learned while they arrive and are computed: their wait, their cost, their rate."""

from __future__ import annotations

import pytest

from epd.control.retention import PromptLoad
from epd.serve_app.orchestration.retention import PromptLoadEstimator


def test_a_busy_worker_is_learned_by_its_first_tokens_and_an_idle_one_by_its_prefill() -> None:
    """0.1 s and 1 ms per token, while the worker is busy; before that 0.7 s of encoding alone."""
    estimator, now_s = PromptLoadEstimator(), 0.0
    estimator.arrived(0.0, 20, 480)
    estimator.first_token(1.3, "p0", 0.0, 500, prefill_s=0.6)
    now_s = 1.3
    for number in range(60):
        tokens = (500, 270, 140)[number % 3]
        now_s += 0.1 + 0.001 * tokens
        estimator.first_token(now_s, "p0", 0.5, tokens, prefill_s=9.0)
    load = estimator.load(now_s, [500, 500], num_workers=1)
    assert load.service_s(1.0) == pytest.approx(0.6, rel=0.05)
    assert load.service_s(0.25) == pytest.approx(0.24, rel=0.1)
    assert load.wait_s == pytest.approx(1.2, rel=0.05)
    alone = estimator.load(now_s, [], num_workers=1)
    assert alone.wait_s == pytest.approx(0.7)
    assert estimator.load(now_s, [500, 500, 500, 500], num_workers=2).wait_s == pytest.approx(1.2, rel=0.05)


def test_one_request_that_a_burst_held_up_is_not_what_requests_wait() -> None:
    estimator = PromptLoadEstimator()
    for number in range(5):
        placed_s = 10.0 * number
        waited_s = 0.4 if number == 4 else 0.01
        estimator.first_token(placed_s + waited_s + 0.1, "p0", placed_s, 100, prefill_s=0.1)
    assert estimator.load(50.0, [], num_workers=1).wait_s == pytest.approx(0.01)


def test_the_rate_of_arrivals_is_followed_and_forgotten() -> None:
    estimator = PromptLoadEstimator()
    for number in range(100):
        estimator.arrived(number * 0.25, 10, 100)
    assert estimator.load(24.75, [], num_workers=1).rate == pytest.approx(4, rel=0.1)
    assert estimator.load(24.75, [], num_workers=2).rate == pytest.approx(2, rel=0.1)
    assert estimator.load(60, [], num_workers=1).rate < 0.01


def test_before_anything_is_known_nothing_is_predicted() -> None:
    assert PromptLoadEstimator().load(0.0, [500] * 9, num_workers=1) == PromptLoad()


def test_workers_learn_from_each_other_and_are_timed_each_by_itself() -> None:
    """Two workers in step: what one computes between its own first tokens is what a prompt takes."""
    estimator = PromptLoadEstimator()
    for number in range(40):
        now_s = number * 0.5
        for worker in ("p0", "p1"):
            estimator.first_token(now_s, worker, now_s - 0.9, 100, prefill_s=0.1)
    assert estimator.load(20.0, [100] * 4, num_workers=2).wait_s == pytest.approx(1.0, rel=0.1)


def test_the_mean_prompt_is_known_at_every_retention() -> None:
    """Visual tokens are counted as they were before reduction."""
    estimator = PromptLoadEstimator()
    assert estimator.tokens_at(0.5) == 0
    for _ in range(50):
        estimator.arrived(0.0, num_text_tokens=20, num_visual_tokens=400)
    assert [estimator.tokens_at(retention) for retention in (1.0, 0.5, 0.05)] == [420, 220, 40]


def test_newer_prompts_count_for_more() -> None:
    estimator = PromptLoadEstimator()
    for num_visual in (*[100] * 100, *[1000] * 100):
        estimator.arrived(0.0, 0, num_visual)
    assert estimator.tokens_at(1.0) == pytest.approx(1000, rel=0.01)


def test_queue_and_memory_are_passed_on_as_they_are() -> None:
    load = PromptLoadEstimator().load(0.0, [], num_workers=3, num_waiting=7, kv_usage=0.4)
    assert (load.num_waiting, load.kv_usage, load.rate) == (7, 0.4, 0.0)
