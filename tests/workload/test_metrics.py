"""Latencies, percentiles, SLO attainment and goodput against values worked out by hand."""

from __future__ import annotations

import pytest

from epd.errors import RequestError
from epd.workload.metrics import SLO, ClientRecord, Latency, ratios, report_of

# Sent 0.1 s late; first token 0.4 s later, then gaps of 0.2 and 0.4 s; ends 0.1 s after the last token.
SLOW = ClientRecord(0, 1.0, 1.1, 2.2, (1.5, 1.7, 2.1), prompt_tokens=50, completion_tokens=8)
QUICK = ClientRecord(1, 2.0, 2.0, 2.3, (2.1, 2.2), prompt_tokens=10, completion_tokens=3)
ONE_TOKEN = ClientRecord(2, 3.0, 3.0, 3.2, (3.2,), prompt_tokens=10, completion_tokens=1)
REFUSED = ClientRecord(3, 3.5, 3.5, 4.0, (), error="HTTP 429")


def test_latencies_of_one_request() -> None:
    assert SLOW.lateness_s == pytest.approx(0.1)
    assert SLOW.ttft_s == pytest.approx(0.4)
    assert SLOW.itl_s == pytest.approx((0.2, 0.4))
    assert SLOW.e2e_s == pytest.approx(1.1)
    assert SLOW.tpot_s == pytest.approx((1.1 - 0.4) / 7)


def test_a_long_answer_that_comes_four_tokens_at_a_time_has_the_time_of_one() -> None:
    """As where drafts hold: 121 tokens in 31 pieces."""
    times = tuple(0.5 + 0.4 * number for number in range(31))
    long = ClientRecord(5, 0.0, 0.0, 12.5, times, prompt_tokens=50, completion_tokens=121)
    assert long.tpot_s == pytest.approx(0.1)
    assert long.itl_s == pytest.approx((0.4,) * 30)


def test_what_has_no_latency() -> None:
    assert ONE_TOKEN.tpot_s is None
    assert ONE_TOKEN.ttft_s == pytest.approx(0.2)
    assert (REFUSED.ttft_s, REFUSED.tpot_s, REFUSED.e2e_s, REFUSED.itl_s) == (None, None, None, ())
    cut = ClientRecord(4, 0.0, 0.0, 2.0, (1.0, 2.0), completion_tokens=2, error="connection cut")
    assert (cut.ttft_s, cut.tpot_s, cut.e2e_s, cut.itl_s) == (None, None, None, ())


def test_times_that_go_backwards_are_refused() -> None:
    with pytest.raises(ValueError, match="request 7"):
        ClientRecord(7, 1.0, 0.9, 2.0)


def test_percentiles_lie_between_ranks_in_proportion() -> None:
    latency = Latency.of([0.4, None, 0.1, 0.3, 0.2])
    assert latency is not None
    assert latency.num == 4
    # Index p / 100 * 3: 1.5, 2.7, 2.85, 2.97.
    found = (latency.p50_s, latency.p90_s, latency.p95_s, latency.p99_s)
    assert found == pytest.approx((0.25, 0.37, 0.385, 0.397))
    assert (latency.min_s, latency.mean_s, latency.max_s) == pytest.approx((0.1, 0.25, 0.4))
    assert Latency.of([None]) is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(), [True, True, True, False]),
        (SLO(ttft_s=0.3), [False, True, True, False]),
        (SLO(tpot_s=0.1001), [True, True, True, False]),
        (SLO(tpot_s=0.0999), [False, False, True, False]),
        (SLO(ttft_s=0.15, tpot_s=0.2), [False, True, False, False]),
        (SLO(e2e_s=0.25), [False, False, True, False]),
    ],
)
def test_who_meets_an_objective(slo: SLO, met: list[bool]) -> None:
    assert [slo.is_met(record) for record in (SLOW, QUICK, ONE_TOKEN, REFUSED)] == met


def test_an_objective_of_nothing_is_refused() -> None:
    with pytest.raises(RequestError, match="ttft_s is 0"):
        SLO(ttft_s=0.0)


def test_a_report_over_two_rounds() -> None:
    report = report_of([[SLOW, QUICK, ONE_TOKEN, REFUSED], [QUICK]], SLO(ttft_s=0.15))
    # The rounds last until their last ends: 4.0 and 2.3 s. Both QUICK meet the limit, of 5 requests.
    assert report.duration_s == pytest.approx(6.3)
    assert (report.num_requests, report.num_ok) == (5, 4)
    assert report.requests_per_s == pytest.approx(4 / 6.3)
    assert report.slo_attainment == pytest.approx(2 / 5)
    assert report.goodput_per_s == pytest.approx(2 / 6.3)
    assert (report.prompt_tokens, report.completion_tokens) == (80, 15)
    assert report.tokens_per_s == pytest.approx(15 / 6.3)
    assert report.errors == {"HTTP 429": 1}
    assert report.ttft is not None
    assert report.ttft.num == 4
    assert report.itl is not None
    assert report.itl.num == 4
    assert report.lateness is not None
    assert report.lateness.num == 5


def test_a_report_of_failures_alone() -> None:
    report = report_of([[REFUSED]], SLO())
    assert (report.ttft, report.tpot, report.e2e) == (None, None, None)
    assert (report.num_ok, report.slo_attainment, report.goodput_per_s) == (0, 0.0, 0.0)


def test_nothing_to_report() -> None:
    with pytest.raises(ValueError, match="at least one"):
        report_of([[]], SLO())


def late(by_s: float, ttft_s: float) -> ClientRecord:
    return ClientRecord(0, 1.0, 1.0 + by_s, 99.0, (1.0 + by_s + ttft_s,), completion_tokens=1)


@pytest.mark.parametrize(
    ("by_s", "ttft_s", "is_late"),
    [(0.019, 0.05, False), (0.03, 0.05, True), (0.03, 1.0, False), (0.06, 1.0, True)],
)
def test_a_late_generator_is_told_apart(by_s: float, ttft_s: float, is_late: bool) -> None:
    """More than 20 ms and more than a twentieth of the median TTFT."""
    report = report_of([[late(by_s, ttft_s)] * 20], SLO())
    assert report.is_late is is_late
    assert not report_of([[late(by_s, ttft_s)]], SLO(), is_open_loop=False).is_late


def test_ratios_are_medians_of_rounds() -> None:
    """TTFT 0.1, 0.4 and 0.2 s over 0.1, 0.1 and 0.4 s: 1, 4 and 0.5."""
    ours = [report_of([[late(0.0, ttft_s)]], SLO()) for ttft_s in (0.1, 0.4, 0.2)]
    theirs = [report_of([[late(0.0, ttft_s)]], SLO()) for ttft_s in (0.1, 0.1, 0.4)]
    found = {ratio.figure: ratio for ratio in ratios("ours", "theirs", list(zip(ours, theirs, strict=True)))}
    ttft = found["TTFT p50"]
    assert (ttft.median, ttft.low, ttft.high, ttft.num_rounds) == pytest.approx((1.0, 0.5, 4.0, 3))
    assert "TPOT p50" not in found, "answers of one token have none"


def test_rounds_without_an_answer_are_left_out_of_ratios() -> None:
    good, bad = report_of([[QUICK]], SLO()), report_of([[REFUSED]], SLO())
    found = {ratio.figure: ratio for ratio in ratios("a", "b", [(good, good), (good, bad), (bad, good)])}
    assert {ratio.num_rounds for ratio in found.values()} == {1}
