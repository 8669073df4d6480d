"""What is learned of a load from arrivals and metrics alone, and what is predicted from it.

Modules: `epd/control/elasticity/cluster.py`, `epd/control/elasticity/rates.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.control.elasticity.cluster import ClusterTraffic, StageSample, WorkerSample, damped
from epd.control.elasticity.estimator import Peak, RateTrend, Traffic, TrafficEstimator
from epd.control.elasticity.rates import RoundCost, UnitCost
from epd.control.recent import RequestWork
from epd.profiles.cost import StageCost
from epd.topology import Stage
from tests.control.elasticity.clusters import roles_of

IMAGE = RequestWork(num_patches=1000, num_prompt_tokens=300, max_tokens=100)
TEXT = RequestWork(num_patches=0, num_prompt_tokens=100, max_tokens=100)


# Parts


def test_a_constant_rate_has_no_trend() -> None:
    trend = RateTrend(20.0)
    for _ in range(100):
        trend.add(6, 2.0)
    assert trend.rate == pytest.approx(3.0)
    assert trend.slope == pytest.approx(0.0)


def test_a_rising_rate_is_drawn_out_but_not_for_ever() -> None:
    trend = RateTrend(20.0)
    for second in range(300):
        trend.add(0.1 * second, 1.0)
    assert trend.slope == pytest.approx(0.1, rel=0.1)
    assert trend.rate == pytest.approx(30.0, rel=0.05)
    soon, late = (damped(trend.rate, trend.slope, trend.memory_s, ahead) for ahead in (10.0, 1e6))
    assert trend.rate + 0.6 < soon < trend.rate + 1.0
    assert late == pytest.approx(trend.rate + 20 * trend.slope)
    assert damped(1.0, -5.0, 20.0, 60.0) == 0.0


def test_one_early_burst_is_no_rate() -> None:
    trend = RateTrend(20.0)
    trend.add(10, 1.0)
    for _ in range(9):
        trend.add(0, 1.0)
    assert trend.rate == pytest.approx(1.0)
    assert trend.slope == 0.0


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(0, 100), min_size=1, max_size=40),
    window_s=st.integers(1, 50),
    lasting_s=st.integers(0, 20),
)
def test_a_peak_is_the_largest_value_that_lasted(values: list[float], window_s: int, lasting_s: int) -> None:
    peak = Peak(float(window_s), float(lasting_s))
    lasted = []
    for second, value in enumerate(values):
        peak.add(float(second), value)
        lasted.append(min(values[second - lasting_s : second + 1]) if second >= lasting_s else 0.0)
        assert peak.value == max(lasted[max(0, second - window_s) :])


def test_a_fading_peak_halves_with_each_window_after_the_first() -> None:
    peak = Peak(10.0, fades=True)
    peak.add(0.0, 8.0)
    seen = []
    for second in (10.0, 20.0, 30.0, 40.0):
        peak.add(second, 1.5)
        seen.append(peak.value)
    assert seen == [8.0, 4.0, 2.0, 1.5]


@settings(max_examples=25, deadline=None)
@given(true_s=st.floats(1e-3, 1.0), prior_s=st.one_of(st.none(), st.floats(1e-3, 1.0)))
def test_seconds_per_unit_converge_whatever_was_believed(true_s: float, prior_s: float | None) -> None:
    cost = UnitCost(20.0, prior_s, 100.0)
    assert cost.unit_s == (None if prior_s is None else pytest.approx(prior_s))
    while not cost.unit_s or abs(cost.unit_s / true_s - 1) > 0.01:
        before = cost.unit_s
        cost.add(100.0, 100.0 * true_s)
        assert before is None or abs((cost.unit_s or 0.0) - true_s) < abs(before - true_s)


@settings(max_examples=50, deadline=None)
@given(
    round_s=st.floats(0.001, 0.1),
    unit_s=st.floats(0.0001, 0.02),
    sizes=st.lists(st.integers(1, 64), min_size=20, max_size=40),
)
def test_a_line_is_learned_from_rounds_of_several_sizes(
    round_s: float, unit_s: float, sizes: list[int]
) -> None:
    cost = RoundCost(60.0)
    for size in [1, 64, *sizes]:
        cost.add(10, 10 * size, 10 * (round_s + unit_s * size))
    assert cost.line is not None
    for size in (1, 64):
        assert cost.line[0] + cost.line[1] * size == pytest.approx(round_s + unit_s * size, rel=0.1)


def test_rounds_of_one_size_tell_their_time_and_leave_the_slope_as_it_was() -> None:
    cost = RoundCost(60.0, (0.02, 0.001))
    for _ in range(200):
        cost.add(10, 80, 10 * 0.05)
    assert cost.line is not None
    round_s, unit_s = cost.line
    assert unit_s == pytest.approx(0.001, rel=0.05)
    assert round_s + 8 * unit_s == pytest.approx(0.05, rel=0.01)


def test_noise_in_rounds_of_nearly_one_size_says_nothing_of_the_slope() -> None:
    """The shorter prompts of a burst took longer, as they waited: that is no cost that falls with length."""
    cost = RoundCost(20.0)
    for _ in range(4):
        cost.add(1, 117, 0.006)
    for _ in range(8):
        cost.add(1, 113, 0.012)
    assert cost.line is not None
    round_s, unit_s = cost.line
    assert 0.2 < 115 * unit_s / (round_s + 115 * unit_s) < 0.7


# The whole


class Workers:
    """Workers with true costs, seconds of a patch, a token, a step, a request; totals grow as they work."""

    PATCH_S, TOKEN_S, STEP_S, SEQUENCE_S = 0.0005, 0.001, 0.02, 0.005

    def __init__(self, topology: str) -> None:
        self.roles = roles_of(topology)
        self.samples: dict[str, StageSample] = {name: StageSample() for name in self.roles}

    def work(self, name: str, units: float, rounds: int, busy_s: float) -> None:
        old = self.samples[name]
        self.samples[name] = StageSample(
            0, 0.0, old.done_units + units, old.num_rounds + rounds, old.busy_s + busy_s
        )

    def second(self, rate: float, batch: int) -> None:
        """What a second of such requests makes them do, with `batch` answers under way."""
        self.work("e0", 1000 * rate, 1, 1000 * rate * self.PATCH_S)
        self.work("p0", 300 * rate, 1, 300 * rate * self.TOKEN_S)
        rounds = int(1 / (self.STEP_S + self.SEQUENCE_S * batch))
        self.work("d0", rounds * batch, rounds, rounds * (self.STEP_S + self.SEQUENCE_S * batch))

    def views(self) -> list[WorkerSample]:
        stages: Mapping[str, Stage] = {"e": "encode", "p": "prefill", "d": "decode"}
        return [
            WorkerSample(name, roles, 0.0, {stages[name[0]]: self.samples[name]})
            for name, roles in self.roles.items()
        ]


def followed(estimator: TrafficEstimator, rate: int = 1, seconds: int = 60) -> ClusterTraffic:
    """A minute of requests with images; answers take 40 tokens of the 100 that were allowed."""
    workers, num_ended = Workers("1e1p1d"), 0
    traffic = estimator.observe(0.0, workers.views())
    for second in range(seconds):
        for number in range(rate):
            estimator.arrived(second + number / rate, IMAGE)
        batch = 4 + second % 8
        workers.second(rate, batch)
        while num_ended < workers.samples["d0"].done_units // 40:
            estimator.finished(float(second))
            num_ended += 1
        traffic = estimator.observe(second + 1.0, workers.views())
    return traffic


@pytest.mark.parametrize(
    "costs",
    [
        {},
        {
            "encode": StageCost(per_unit_s=0.01),
            "prefill": StageCost(per_unit_s=1e-5),
            "decode": StageCost(0.2, 0.0, 1e-4),
        },
    ],
    ids=["nothing known", "wrong beforehand"],
)
def test_costs_are_learned_from_what_workers_do(costs: dict[Stage, StageCost]) -> None:
    """As in the live system, where no profile tells them; a wrong one is forgotten."""
    traffic = followed(TrafficEstimator(costs=costs))
    assert traffic.is_known
    assert traffic.arrival_rate == pytest.approx(1.0, rel=0.05)
    assert traffic.stages["encode"].need.request_s == pytest.approx(0.5, rel=0.05)
    assert traffic.stages["prefill"].need.request_s == pytest.approx(0.3, rel=0.05)
    decode = traffic.stages["decode"].need
    assert decode.num_parts == pytest.approx(40, rel=0.1)
    assert decode.round_s == pytest.approx(Workers.STEP_S, rel=0.2)
    assert decode.part_s == pytest.approx(Workers.SEQUENCE_S, rel=0.2)
    assert traffic.stages["encode"].utilisation == pytest.approx(0.5, rel=0.01)
    encode = traffic.stages["encode"]
    assert encode.demand / encode.num_workers == pytest.approx(0.5, rel=0.1)


def test_without_a_measurement_or_a_profile_nothing_is_known() -> None:
    estimator = TrafficEstimator()
    for second in range(10):
        estimator.arrived(float(second), IMAGE)
    assert not estimator.observe(10.0, Workers("1e1p1d").views()).is_known


def test_queued_work_is_told_in_seconds() -> None:
    known: dict[Stage, StageCost] = {
        "encode": StageCost(per_unit_s=0.002), "prefill": StageCost(per_unit_s=0.001),
        "decode": StageCost(0.01, 0.0, 0.001),
    }  # fmt: skip
    estimator = TrafficEstimator(costs=known)
    for second in range(5):
        estimator.arrived(float(second), IMAGE)
    views = Workers("2e1p1d").views()
    queue = {"e0": StageSample(2, 1500.0), "e1": StageSample(1, 500.0), "p0": StageSample(3, 600.0),
             "d0": StageSample(5)}  # fmt: skip
    views = [
        WorkerSample(each.name, each.roles, 0.0, {next(iter(each.stages)): queue[each.name]})
        for each in views
    ]
    traffic = estimator.observe(5.0, views)
    assert traffic.stages["encode"].queued_s == pytest.approx(4.0)
    assert traffic.stages["encode"].num_requests == pytest.approx(2.0)
    assert traffic.stages["prefill"].queued_s == pytest.approx(0.6)
    assert traffic.stages["decode"].queued_s == pytest.approx(100 * (0.01 + 5 * 0.001))
    assert traffic.workers[0].queued_s == {"encode": pytest.approx(3.0)}
    assert traffic.workers[3].drain_s == pytest.approx(1.5)


def test_text_needs_no_encoder_and_a_mix_as_much_as_its_share() -> None:
    estimator = TrafficEstimator(costs={"encode": StageCost(per_unit_s=0.001)})
    for number in range(40):
        estimator.arrived(number / 4, IMAGE if number % 4 == 0 else TEXT)
    encode = estimator.observe(10.0, []).stages["encode"]
    assert encode.need.share == pytest.approx(0.25, abs=0.05)
    assert encode.need.request_s == pytest.approx(1.0)
    assert encode.demand == pytest.approx(1.0, rel=0.2)


def test_a_worker_started_anew_begins_from_nothing() -> None:
    """Its totals are small again: all of them are new work, half a second of encoding in one second."""
    estimator = TrafficEstimator()
    before = followed(estimator, seconds=20)
    fresh = Workers("1e1p1d")
    fresh.second(1, 4)
    after = estimator.observe(21.0, fresh.views())
    assert after.stages["encode"].utilisation == pytest.approx(0.5)
    assert after.stages["encode"].need.request_s == pytest.approx(before.stages["encode"].need.request_s)


def test_a_full_cache_limits_how_many_answers_go_on_at_once() -> None:
    estimator = TrafficEstimator(costs={"decode": StageCost(0.01, 0.0, 0.001)})
    estimator.arrived(0.0, TEXT)
    views = [WorkerSample("d0", frozenset({"decode"}), 0.0, {"decode": StageSample(8)}, kv_usage=0.5)]
    assert estimator.observe(1.0, views).stages["decode"].need.max_batch == pytest.approx(16.0)


def test_an_answer_that_may_fill_the_context_is_expected_to_be_a_typical_one() -> None:
    """Until answers have ended; then what they were counts, up to what requests allow."""
    traffic = Traffic(memory_s=60.0)
    traffic.arrived(0.0, RequestWork(0, 100, max_tokens=30_000, expected_tokens=256))
    assert traffic.output_tokens == 256
    for _ in range(3):
        traffic.finished()
    traffic.look(1.0, 2700.0)
    assert traffic.output_tokens == pytest.approx(900.0)
