"""The real application in virtual time: a round is the same again, and lasts as long as the simulator says.

Modules: `benchmarks/epd_pays/virtual.py`, `benchmarks/epd_pays/virtual_workers.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from benchmarks.epd_pays.replicas import (
    ATTAINMENT,
    LEAST_OVERLOAD,
    TRAFFIC,
    error_rows,
    few_requests,
    first_tokens,
    length_rows,
    objective_rows,
    question,
    rounds_of,
)
from epd.bench.compare import Case, Comparison
from epd.serve_app.cli.compare import simulated
from epd.stages.decoder.decoder import FusedDecoder
from epd.workload.comparison import Layout, Outcome, Round, Traffic

NUM_REQUESTS = 6


def asked(number: int) -> Comparison:
    """Returns the question about one kind of traffic, with few requests."""
    traffic = TRAFFIC[number]
    workload = traffic.workload.model_copy(update={"num_requests": NUM_REQUESTS})
    return Comparison(question((traffic.model_copy(update={"workload": workload}),), 1))


def run(found: Comparison, layout: str, rate: float, media: Path) -> tuple[Case, Round]:
    (traffic,) = found.question.traffic
    case = Case(traffic, Layout.parse(layout), rate, 0)
    (one,) = rounds_of(found, [case], media)
    return case, one


def test_a_round_is_the_same_again_to_the_last_bit(tmp_path: Path) -> None:
    found = asked(4)
    (_, first), (_, second) = (run(found, "1e1p1d", 8.0, tmp_path) for _ in range(2))
    assert first == second
    assert first.late_share == 0
    assert not first.is_late
    assert [each.error for each in first.outcomes] == [None] * NUM_REQUESTS


def test_a_round_leaves_no_model(tmp_path: Path) -> None:
    """A worker of all roles has no others to share a model with, and its model is as large as theirs."""
    found = asked(0)
    case = Case(found.question.traffic[0], Layout.parse("1epd"), 8.0, 0)
    nums = []
    for _ in rounds_of(found, [case, replace(case, index=1)], tmp_path):
        gc.collect()
        nums.append(sum(issubclass(type(each), FusedDecoder | nn.Module) for each in gc.get_objects()))
    assert nums[0] == nums[1]


@pytest.mark.parametrize("layout", ["3x1epd", "1e1p1d"])
def test_the_simulator_says_how_long_the_application_takes(layout: str, tmp_path: Path) -> None:
    """Requests that come while others are computed: their media are encoded beside passes of prefill.

    The template that all prompts begin with is computed once. A pass of decoding, 12.7 ms, may come first.
    """
    found = asked(0)
    case, one = run(found, layout, 12.0, tmp_path)
    found.rounds[one.key], found.simulated[case.key] = one, simulated(found, case)
    (row,) = error_rows(found)
    assert row["figures"] == 2
    told = found.simulated[case.key]
    for name in ("ttft_s", "tpot_s"):
        ours, theirs = (_values(each.outcomes, name) for each in (one, told))
        assert theirs == pytest.approx(ours, abs=0.0135), name


def _values(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [getattr(each, name) for each in outcomes]


def test_the_same_rounds_are_asked_for_their_first_tokens_alone() -> None:
    """3 s and 40 ms a token are asked for, then 1.5 s alone. Replicas answer soon and unsteadily."""
    (traffic,) = asked(3).question.traffic
    soon, steady = Outcome("video", 1.0, 0.08), Outcome("video", 2.0, 0.02)
    told = {"3x1epd": soon, "3x1epd+chunk=512": soon, "1e1p1d": steady, "1e2pd": soon, "2ep1d": steady}
    rounds = [
        Round(traffic.name, layout, rate, 0, (one,)) for layout, one in told.items() for rate in traffic.rates
    ]
    both, first = objective_rows(Comparison(question((traffic,), 1), rounds))
    assert (both["TTFT s"], both["TPOT ms"], first["TTFT s"], first["TPOT ms"]) == (3.0, "40", 1.5, "any")
    assert [both[f"splits that {word}"] for word in ("win", "lose")] == [2, 0]
    assert [first[f"splits that {word}"] for word in ("win", "lose")] == [0, 2]
    assert both["equal"] == first["equal"] == 1
    assert first_tokens(Comparison(question((traffic,), 1), rounds)).rounds.keys() == {
        each.key for each in rounds
    }


def _in_time(traffic: Traffic, num_requests: int) -> float:
    """Returns the share of requests that one device begins in time, if it gets too many, evenly spaced."""
    gap_s = 1 / max(traffic.rates)
    free_s, in_time = 0.0, 0
    for due_s in (number * gap_s for number in range(num_requests)):
        begin_s = max(free_s, due_s)
        free_s = begin_s + gap_s * (1 + LEAST_OVERLOAD)
        in_time += begin_s - due_s <= (traffic.slo.ttft_s or 0.0)
    return in_time / num_requests


@pytest.mark.parametrize(("traffic", "few"), list(zip(TRAFFIC, few_requests(), strict=True)))
def test_a_round_lasts_until_an_overload_is_seen_and_16_requests_do_not(
    traffic: Traffic, few: Traffic
) -> None:
    num_requests = round(max(traffic.rates) * (traffic.workload.duration_s or 0.0))
    assert _in_time(traffic, num_requests) == pytest.approx(ATTAINMENT, abs=0.03)
    assert (few.name, few.slo, few.dilate) == (traffic.name, traffic.slo, 1.0)
    assert len(list(few.at(few.rates[-1]).resolve().requests(0, 0))) == 16
    assert _in_time(few, 16) == 1.0


def test_verdicts_by_few_requests_stand_beside_those_of_long_rounds() -> None:
    """Few requests are all answered in time; in a longer round only replicas still do."""
    traffic, few = TRAFFIC[3], few_requests()[3]
    good, bad = Outcome("video", 1.0, 0.01), Outcome("video", 9.0, 0.01)

    def told(of: Traffic, late: Outcome) -> Comparison:
        found = Comparison(question((of,), 1))
        for layout in found.layouts:
            outcome = late if layout.is_split else good
            for rate in of.rates:
                one = Round(of.name, layout.name, rate, 0, (outcome,))
                found.rounds[one.key] = one
        return found

    rows = length_rows(told(few, good), told(traffic, bad))
    assert [row["layout"] for row in rows] == ["1e1p1d", "1e2pd", "2ep1d"]
    for row in rows:
        short, long = list(row.values())[2:]
        assert short.startswith("equal: 1.00")
        assert long.startswith("loses")
