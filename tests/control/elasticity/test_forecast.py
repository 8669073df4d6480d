"""What becomes of a load: against hand-computed flows, and more workers are never worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.control.elasticity.cluster import StageNeed
from epd.control.elasticity.controller import SwitchHistory
from epd.control.elasticity.forecast import USABLE, Phase, look_ahead
from epd.topology import STAGES, Stage
from tests.control.elasticity.clusters import NEEDS, cluster, roles_of

ENCODE, DECODE = frozenset[Stage]({"encode"}), frozenset[Stage]({"decode"})


def spent_s(topology: str, horizon_s: float = 30.0, **traffic: object) -> float:
    found = cluster(roles_of(topology), **traffic)  # type: ignore[arg-type]
    return look_ahead(
        found, [Phase(horizon_s, found.capacity(roles_of(topology).values()))], horizon_s
    ).spent_s


def test_a_line_takes_the_triangle_of_its_queue() -> None:
    """Twenty of a second each, one after another, in 85 % of the time; then 0.2 s of prefill, and
    200 steps of 12 ms of decode, alone."""
    line_s = 20 * 20 / USABLE / 2
    rest_s = 20 * (0.2 + 200 * 0.012)
    assert spent_s("1e3p9d", requests={"encode": 20.0}) == pytest.approx(line_s + rest_s, rel=0.1)


def test_what_is_left_at_the_horizon_counts_to_its_end() -> None:
    """Whether one looks for ten seconds or for a hundred at a queue of fifty."""
    short, long = (spent_s("1e3p9d", horizon_s, requests={"encode": 50.0}) for horizon_s in (10.0, 100.0))
    assert short == pytest.approx(long, rel=0.15)


def test_a_phase_counts_up_to_its_end_and_not_there() -> None:
    """What ends at the start of the horizon counts for nothing."""
    traffic = cluster(roles_of("1e1p1d"), requests={"encode": 20.0})
    capacity = traffic.capacity(roles_of("1e1p1d").values())
    over, now = Phase(0.0, dict.fromkeys(STAGES, 0.0)), Phase(30.0, capacity)
    assert look_ahead(traffic, [over, now], 30.0).spent_s == look_ahead(traffic, [now], 30.0).spent_s
    late = replace(over, until_s=15.0)
    assert look_ahead(traffic, [late, now], 30.0).spent_s > look_ahead(traffic, [now], 30.0).spent_s


def test_answers_share_a_worker() -> None:
    """Ten answers of 200 steps, 10 ms and 2 ms for each of them: 6 s on one worker, 2.4 s on ten."""
    alone, together = (spent_s(f"1e1p{num}d", requests={"decode": 10.0}) for num in (10, 1))
    assert alone == pytest.approx(10 * 2.4, rel=0.25)
    assert 1.4 * alone < together < 10 * 6.0


def test_a_full_cache_makes_answers_wait() -> None:
    small = {**NEEDS, "decode": replace(NEEDS["decode"], max_batch=2.0)}
    assert spent_s("1e1p1d", requests={"decode": 10.0}, needs=small) > spent_s(
        "1e1p1d", requests={"decode": 10.0}
    )


def test_text_goes_past_the_encoders() -> None:
    text = {**NEEDS, "encode": StageNeed(0.0, part_s=1.0)}
    traffic = cluster(roles_of("1e1p1d"), rate=5.0, needs=text)
    found = look_ahead(traffic, [Phase(30.0, traffic.capacity(roles_of("1e1p1d").values()))], 30.0)
    assert found.most_waiting["encode"] == 0
    assert found.most_waiting["prefill"] > 2


@settings(max_examples=50, deadline=None)
@given(
    rate=st.floats(0.0, 5.0),
    queue=st.floats(0.0, 200.0),
    num=st.integers(1, 6),
    stage=st.sampled_from(STAGES),
)
def test_one_more_worker_is_never_worse_where_later_stages_keep_up(
    rate: float, queue: float, num: int, stage: Stage
) -> None:
    traffic = cluster(roles_of("1e1p1d"), rate=rate, requests={stage: queue})
    before = {**dict.fromkeys(STAGES, 500.0), stage: float(num)}
    after = {**before, stage: num + 1.0}
    worse, better = (look_ahead(traffic, [Phase(30.0, each)], 30.0).spent_s for each in (before, after))
    assert better <= worse * (1 + 1e-6)


def test_turns_are_counted_by_stage_and_forgotten() -> None:
    history = SwitchHistory(100.0)
    history.add(0.0, "a", ENCODE, DECODE)
    assert history.turns(1.0, ENCODE, DECODE) == (0, float("inf"))
    assert history.turns(10.0, DECODE, ENCODE) == (1, 10.0)
    history.add(10.0, "a", DECODE, ENCODE)
    assert history.turns(20.0, ENCODE, DECODE) == (2, 10.0)
    assert history.turns(20.0, DECODE, ENCODE) == (1, 20.0)
    history.withdraw("a")
    assert history.turns(20.0, ENCODE, DECODE) == (0, float("inf"))
    assert history.turns(101.0, DECODE, ENCODE) == (0, float("inf"))
