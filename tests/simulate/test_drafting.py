"""Drafts in the simulator: tokens of a pass, whether they pay, and that answers keep their length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd.errors import RequestError
from epd.planning.goodput import Demand, rate_bound
from epd.profiles.profile import Profile
from epd.simulate import Deployment, Simulation, SimulationResult
from epd.simulate.drafting import DraftPlan, acceptance_of
from epd.topology import parse_topology
from epd.workload.metrics import SLO
from tests.simulate.test_simulation import PROFILE, TIGHT, flat, jobs, plain_profile, simulate


def run(profile: Profile, plan: DraftPlan | None, **part: str) -> SimulationResult:
    """Returns one request at a time: passes of 10 ms."""
    work = [replace(job, due=job.due * 1000) for job in jobs(profile, 30, images="0", **part)]
    return simulate(profile, "1epd", work, drafts=plan)


def test_as_many_tokens_come_in_a_pass_as_hold() -> None:
    """All eight drafts hold: nine tokens a pass, once their cost has been measured in eight passes."""
    plain = run(plain_profile(), None, output_tokens="401")
    drafted = run(plain_profile(), DraftPlan(1.0, 8), output_tokens="401")
    assert plain.tpot_s == pytest.approx([0.01] * 30)
    assert drafted.tpot_s[-1] == pytest.approx(0.01 / 9, rel=0.1)
    assert (drafted.rows["output_tokens"] == plain.rows["output_tokens"]).all()


def test_a_drafted_token_costs_what_another_sequence_does() -> None:
    """Passes of 10 ms and 1 ms for each token in them."""
    profile = replace(plain_profile(), decode=replace(PROFILE.decode, cost=flat(0.01, 0.001)))
    drafted = run(profile, DraftPlan(1.0, 8), output_tokens="401")
    assert drafted.tpot_s[-1] == pytest.approx((0.01 + 9 * 0.001) / 9, rel=0.1)


@pytest.mark.parametrize(("acceptance", "max_draft"), [(0.6, 3), (0.8, 4)])
def test_the_mean_of_a_pass_follows_from_the_acceptance(acceptance: float, max_draft: int) -> None:
    drafted = run(plain_profile(), DraftPlan(acceptance, max_draft), output_tokens="801")
    tokens = sum(acceptance**place for place in range(max_draft + 1))
    assert drafted.tpot_s[1:].mean() == pytest.approx(0.01 / tokens, rel=0.05)
    assert drafted.tokens_per_pass == pytest.approx(tokens, rel=0.05)
    assert acceptance_of(tokens, max_draft) == pytest.approx(acceptance)
    assert run(plain_profile(), None, output_tokens="9").tokens_per_pass == 1


def test_drafts_that_do_not_pay_are_not_made() -> None:
    """A drafted token that costs half a pass and holds every third time."""
    costly = replace(plain_profile(), decode=replace(PROFILE.decode, cost=flat(0.005, 0.005)))
    without, drafted = (run(costly, plan, output_tokens="801") for plan in (None, DraftPlan(0.33, 8)))
    assert drafted.tpot_s == pytest.approx(without.tpot_s, rel=0.02)


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d", "1ep1d"])
@pytest.mark.parametrize("options", [{}, TIGHT, {"enable_prefix_caching": True}], ids=str)
def test_all_answers_end_in_any_layout(topology: str, options: dict[str, object]) -> None:
    work = jobs(PROFILE, 60, rate=8.0, repeat_rate=0.3, output_tokens="1..120")
    result = simulate(PROFILE, topology, work, drafts=DraftPlan(0.7), **options)
    assert not result.rows["is_refused"].any()
    assert (result.rows["end"] > 0).all()


def test_bounds_hold_with_drafts() -> None:
    work = jobs(PROFILE, 150, images="0", output_tokens="60..120")
    deployment = Deployment(parse_topology("1e1p1d"), drafts=DraftPlan(0.8))
    want = Demand.of(work, SLO(ttft_s=1e6))
    bound = rate_bound(PROFILE, deployment, want)
    assert bound > rate_bound(PROFILE, replace(deployment, drafts=None), want)
    result = Simulation(PROFILE, deployment).run(want.at(100 * bound))
    assert len(want.jobs) / (result.rows["end"].max() / 1e12) <= bound


def test_what_is_no_acceptance_is_refused() -> None:
    with pytest.raises(RequestError, match=r"0 \(no drafts\) to 1"):
        DraftPlan(1.2)
    with pytest.raises(RequestError, match="max_draft"):
        DraftPlan(0.5, 0)
