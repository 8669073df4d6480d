"""What the benchmark of autoscaling sends and counts, and a short run of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.elasticity import autoscale_virtual
from benchmarks.elasticity.autoscale_virtual import (
    BUSY_S,
    END_S,
    NUM_TOKENS,
    RAMP,
    TTFT_SLO_S,
    Arrival,
    Run,
    Times,
    drawn,
    is_met,
    run,
    shares,
    waves,
)
from benchmarks.epd_pays.virtual_workers import run_virtual, virtual_workers
from tests.faults.pool import read_once

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def test_arrivals_follow_the_ramp() -> None:
    many = [[each.at_s for each in waves(seed)] for seed in range(40)]

    def per_s(start_s: float, end_s: float) -> float:
        found = sum(start_s <= at_s < end_s for each in many for at_s in each)
        return found / len(many) / (end_s - start_s)

    low, high = RAMP[0][1], RAMP[2][1]
    assert per_s(RAMP[2][0], RAMP[3][0]) == pytest.approx(high, rel=0.05)
    assert per_s(RAMP[1][0], RAMP[2][0]) == pytest.approx((low + high) / 2, rel=0.05)
    assert per_s(RAMP[4][0], END_S) == pytest.approx(low, rel=0.1)
    assert many[0] == sorted(each.at_s for each in waves(0)), "the same in each run"


def test_an_answer_that_was_cut_is_not_attained() -> None:
    tokens_s = [1.0 + 0.01 * number for number in range(NUM_TOKENS)]
    quick, slow, cut = Times.of(0.5, tokens_s), Times.of(1.0 - 2 * TTFT_SLO_S, tokens_s), Times.of(0, [1.0])
    assert quick.tpot_s == pytest.approx(0.01)
    assert [is_met(each) for each in (quick, slow, cut)] == [True, False, False]
    arrivals = [Arrival(at_s, "") for at_s in (0.0, 0.0, 0.0, *(BUSY_S[0],) * 4)]
    row = Run(arrivals, [quick, slow, cut, quick, quick, slow, cut], [3, 4, 4, 3, 3, 5]).row(1, "auto")
    assert (row["attained"], row["attained, busy"]) == (0.429, 0.5)
    assert (row["ups"], row["downs"], row["least to most"], row["mean workers"]) == (2, 1, "3 to 5", 3.67)


def test_a_share_is_of_the_best_fixed_number_of_its_seed() -> None:
    attained = {(1, "3"): 0.2, (1, "5"): 0.8, (1, "auto"): 0.6, (2, "4"): 0.5, (2, "auto"): 0.5}
    rows = [
        {"seed": seed, "workers": workers, "attained": share, "attained, busy": share, "mean workers": 4}
        for (seed, workers), share in {**attained, (3, "auto"): 1.0}.items()
    ]
    found = {row["seed"]: row["attained"] for row in shares(rows)}
    assert found == {1: 0.75, 2: 1.0, "median": 0.875, "least": 0.75, "most": 1.0}


def test_workers_come_and_go_with_the_requests_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as three workers bear, with one more that is wanted from 5 to 20 s."""
    monkeypatch.setattr(autoscale_virtual, "START_S", 2.0)
    looks = iter(range(10**6))
    monkeypatch.setattr(autoscale_virtual, "_wanted", lambda *_: 4 if 5 <= next(looks) < 20 else 3)
    arrivals = [Arrival(float(number), f"{number}") for number in range(30)]
    with read_once(), virtual_workers():
        media = drawn(arrivals, tmp_path)
        found = run_virtual(lambda: run("auto", arrivals, tmp_path, media), 1)
    row = found.row(1, "auto")
    assert (row["ups"], row["downs"], row["least to most"]) == (1, 1, "3 to 4")
    assert row["attained"] > 0.9
