"""Arrival processes: in order, at the rate that was asked for, the same for the same seed."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import RequestError
from epd.workload.arrivals import (
    ArrivalTimes,
    BurstyArrivals,
    ClosedArrivals,
    ConstantArrivals,
    RampArrivals,
    TraceArrivals,
    poisson_arrivals,
)

RATES = st.floats(0.01, 1000.0)
PROCESSES = st.one_of(
    st.builds(ConstantArrivals, RATES),
    st.builds(poisson_arrivals, RATES),
    st.builds(BurstyArrivals, RATES, st.floats(0.05, 20.0)),
    st.builds(RampArrivals, st.floats(0.0, 100.0), RATES, st.floats(0.1, 1000.0)),
)
SEEDS = st.integers(0, 2**32)


def draw(process: ArrivalTimes, seed: int, num: int) -> list[float]:
    return list(islice(process.times_s(np.random.default_rng(seed)), num))


@settings(deadline=None)
@given(PROCESSES, SEEDS)
def test_times_are_in_order_and_follow_from_the_seed(process: ArrivalTimes, seed: int) -> None:
    times_s = draw(process, seed, 300)
    assert times_s[0] >= 0
    assert all(before <= after for before, after in pairwise(times_s))
    assert times_s == draw(process, seed, 300)


@settings(max_examples=30, deadline=None)
@given(RATES, st.floats(0.2, 5.0), SEEDS)
def test_the_mean_rate_is_the_one_asked_for(rate: float, burstiness: float, seed: int) -> None:
    """The mean of n gaps has a relative deviation of (n * burstiness) ** -0.5: six of them are allowed."""
    num = 4000
    mean_gap_s = draw(BurstyArrivals(rate, burstiness), seed, num)[-1] / num
    assert mean_gap_s * rate == pytest.approx(1.0, abs=6 * (num * burstiness) ** -0.5)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_inverse_square_of_the_variation(burstiness: float) -> None:
    gaps_s = np.diff(draw(BurstyArrivals(3.0, burstiness), 5, 40_000))
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_arrivals_are_a_grid() -> None:
    assert draw(ConstantArrivals(4.0), 0, 4) == pytest.approx([0.0, 0.25, 0.5, 0.75])


def test_a_ramp_brings_what_its_area_says() -> None:
    """From 2 to 10 per second in 100 s: 200 in the first half, 400 in the second, then 10 per second."""
    ramp = RampArrivals(2.0, 10.0, 100.0)
    assert [ramp.expected(time_s) for time_s in (0, 50, 100, 110)] == pytest.approx([0, 200, 600, 700])
    counts = np.zeros(3)
    for seed in range(40):
        times_s = np.array(draw(ramp, seed, 900))
        counts += np.histogram(times_s, [0, 50, 100, 110])[0]
    assert counts / 40 == pytest.approx([200, 400, 100], abs=4 * (400 / 40) ** 0.5)


@settings(deadline=None)
@given(st.floats(0.0, 50.0), st.floats(0.1, 50.0), st.floats(1.0, 100.0), st.floats(0.0, 3.0))
def test_a_ramp_is_inverted_exactly(start: float, end: float, ramp_s: float, share: float) -> None:
    ramp = RampArrivals(start, end, ramp_s)
    num_expected = share * ramp.expected(ramp_s)
    assert ramp.expected(ramp._reached_s(num_expected)) == pytest.approx(num_expected, rel=1e-6, abs=1e-9)


def test_a_trace_keeps_its_times_and_a_closed_loop_has_none() -> None:
    assert draw(TraceArrivals((0.0, 0.5, 0.5)), 1, 9) == [0.0, 0.5, 0.5]
    assert draw(ClosedArrivals(), 1, 3) == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="in order"):
        TraceArrivals((1.0, 0.5))


@pytest.mark.parametrize(
    "build",
    [
        lambda: ConstantArrivals(0.0),
        lambda: poisson_arrivals(-1.0),
        lambda: poisson_arrivals(float("inf")),
        lambda: BurstyArrivals(1.0, 0.0),
        lambda: RampArrivals(-1.0, 1.0, 5.0),
        lambda: RampArrivals(0.0, 0.0, 5.0),
        lambda: RampArrivals(0.0, 1.0, 0.0),
        lambda: ConstantArrivals(float("nan")),
    ],
)
def test_what_is_no_rate_is_refused(build: object) -> None:
    with pytest.raises(RequestError):
        build()  # type: ignore[operator]
