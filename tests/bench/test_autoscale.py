"""What the benchmark of autoscaling sends, and what it counts."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own, when it is imported
    from benchmarks.elasticity.autoscale import BUSY_S, END_S, GROUP_S, RAMP, TTFT_SLO_S, Asked, Run, arrivals
    from benchmarks.elasticity.paced_app import slowed


def test_arrivals_follow_the_ramp() -> None:
    many = [list(arrivals(END_S, seed)) for seed in range(40)]

    def per_s(start_s: float, end_s: float) -> float:
        found = sum(start_s <= at_s < end_s for each in many for at_s in each)
        return found / len(many) / (end_s - start_s)

    low, high = RAMP[0][1], RAMP[2][1]
    assert per_s(RAMP[2][0], RAMP[3][0]) == pytest.approx(high, rel=0.05)
    assert per_s(RAMP[1][0], RAMP[2][0]) == pytest.approx((low + high) / 2, rel=0.05)
    assert per_s(RAMP[4][0], END_S) == pytest.approx(low, rel=0.1)
    assert many[0] == sorted(arrivals(END_S, 0))  # the same in each run


def test_an_answer_that_was_cut_is_not_attained() -> None:
    quick, slow, cut = 0.5 * TTFT_SLO_S, 2 * TTFT_SLO_S, None
    asked = [Asked(at_s, ttft_s) for at_s in (0.0, BUSY_S[0]) for ttft_s in (quick, slow, cut)]
    asked.append(Asked(BUSY_S[0] + 1, quick))
    looks = [(0.0, 3), (1.0, 4), (2.0, 4), (3.0, 3)]
    row = Run(asked, looks).row("auto")
    assert (row["requests"], row["not whole"], row["changes"], row["workers"]) == (7, 2, 2, 3.5)
    assert (row["attained"], row["attained, busy"]) == (0.429, 0.5)


def test_an_encoder_takes_its_time_before_anybody_gets_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("epd.serve_app.local.pacing.time", clock)
    encoder = SimpleNamespace(encode=lambda runs: len(runs))
    role: Any = SimpleNamespace(stage=SimpleNamespace(_encoder=encoder))
    assert slowed(role, "prefill") is role
    assert encoder.encode([1]) == 1
    assert slept == []
    assert slowed(role, "encode") is role
    assert encoder.encode([1, 2]) == 2
    assert slept == [2 * GROUP_S]
