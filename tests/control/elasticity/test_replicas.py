"""How many replicas are advised, when that changes and why: stories, a closed loop, and properties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.control.elasticity.cluster import ClusterTraffic, MediaSample
from epd.control.elasticity.replicas import MediaReplicas, ReplicaAdvice, ReplicaConfig, StageReplicas
from epd.topology import parse_topology
from tests.control.elasticity.closed_loop import ClosedLoop
from tests.control.elasticity.clusters import NEEDS, cluster, roles_of

CONFIG = ReplicaConfig(3, 8, up_delay_s=5.0, down_delay_s=60.0)
WANTED = parse_topology("1e1p1d")


def load(rate: float = 0.0, topology: str = "1e1p1d", **fields: object) -> ClusterTraffic:
    return cluster(roles_of(topology), rate=rate, **fields)  # type: ignore[arg-type]


def looks(
    policy: StageReplicas, found: ClusterTraffic, seconds: int, start_s: float = 0.0
) -> list[ReplicaAdvice]:
    """The advice of so many looks at the same load, a second apart."""
    return [policy.advise(replace(found, now_s=start_s + second)) for second in range(seconds)]


# Stories


def test_more_is_advised_after_the_delay_and_in_one_step() -> None:
    """2.2 requests of a second's encoding need 2.6 encoders, 1 prefill worker and 2 decode workers."""
    advice = looks(StageReplicas(CONFIG, WANTED), load(2.2), 7)
    assert [each.num_replicas for each in advice] == [3] * 5 + [6, 6]
    assert [each.verdict for each in advice] == ["up soon"] * 5 + ["up", "enough"]
    assert advice[0].reason == (
        "3 of 3 to 8 replicas, up to 6 in 5 s if it stays so: at most 85% busy, the stages need encode 2.6, "
        "prefill 0.5, decode 1.0 workers"
    )


def test_a_short_wish_changes_nothing() -> None:
    policy = StageReplicas(CONFIG, WANTED)
    assert looks(policy, load(2.2), 5)[-1].verdict == "up soon"
    assert looks(policy, load(0.1), 1, 5.0)[-1].verdict == "enough"
    assert {each.num_replicas for each in looks(policy, load(2.2), 5, 6.0)} == {3}


def test_up_to_the_least_that_was_needed_all_the_time() -> None:
    policy = StageReplicas(CONFIG, WANTED)
    policy.advise(load(1.0))
    looks(policy, load(4.0), 4, 1.0)
    assert looks(policy, load(4.0), 1, 5.0)[-1].num_replicas == 4


def test_fewer_are_advised_after_a_longer_delay() -> None:
    policy = StageReplicas(CONFIG, WANTED)
    advice = looks(policy, load(0.1, "4e1p1d"), 62)
    assert [each.num_replicas for each in advice] == [6] * 60 + [3, 3]
    assert advice[59].verdict == "down soon"
    assert advice[60].verdict == "down"


def test_the_peak_of_the_last_minutes_keeps_its_replicas() -> None:
    policy = StageReplicas(CONFIG, WANTED)
    advice = looks(policy, load(0.1, "4e1p1d", peaks={"encode": 3.0}), 200)
    assert {each.num_replicas for each in advice} == {6}


def test_between_the_two_bounds_nothing_changes() -> None:
    """Two encoders are needed at 1.02 to 1.7 requests per second; one is given up below 0.68."""
    for rate, num in ((0.6, 3), (0.7, 4), (1.6, 4)):
        assert looks(StageReplicas(CONFIG, WANTED), load(rate, "2e1p1d"), 200)[-1].num_replicas == num


def test_a_queue_asks_for_more_though_nothing_comes() -> None:
    """150 requests wait before one encoder: 2.5 of them work that off in a minute."""
    advice = looks(StageReplicas(CONFIG, WANTED), load(requests={"encode": 151.0}), 10)
    assert advice[-1].num_replicas == 3 + 2
    assert "encode 2.9" in advice[-1].reason


def test_answers_that_find_no_place_ask_for_more() -> None:
    """Ten fit a decode worker, at 0.6 s of its time each; 100 more are a minute of one worker's work."""
    needs = {**NEEDS, "decode": replace(NEEDS["decode"], max_batch=10.0)}
    advice = looks(StageReplicas(CONFIG, WANTED), load(requests={"decode": 110.0}, needs=needs), 10)
    assert "decode 1.2 workers" in advice[-1].reason


def test_requests_that_no_worker_has_taken_count() -> None:
    waiting = replace(load(), num_waiting=150)
    assert looks(StageReplicas(CONFIG, WANTED), waiting, 10)[-1].num_replicas > 3


def test_answers_under_way_keep_their_replicas() -> None:
    """Nothing comes, but three decode workers are 80 % full: fewer than three have no room for it."""
    found = load(0.0, "1e1p3d")
    full = tuple(replace(each, kv_usage=0.8 if "d" in each.name else None) for each in found.workers)
    policy = StageReplicas(CONFIG, WANTED)
    assert looks(policy, replace(found, workers=full), 300)[-1].num_replicas == 5
    assert looks(policy, found, 300, 300.0)[-1].num_replicas == 3


def test_an_unknown_load_changes_nothing() -> None:
    advice = looks(StageReplicas(CONFIG, WANTED), replace(load(4.0), is_known=False), 20)
    assert {(each.num_replicas, each.verdict) for each in advice} == {(3, "unknown load")}


def test_at_the_limit_the_advice_says_what_is_missing() -> None:
    advice = looks(StageReplicas(replace(CONFIG, max_replicas=4), WANTED), load(9.0), 20)[-1]
    assert (advice.num_replicas, advice.verdict) == (4, "at the limit")


def waits_s(config: ReplicaConfig, num: int) -> list[float]:
    """Seconds from the end of a wave to fewer replicas, of so many waves one after another."""
    policy, waited_s, now_s = StageReplicas(config, WANTED), [], 0.0
    for _ in range(num):
        assert looks(policy, load(1.5), 10, now_s)[-1].num_replicas > 3
        start_s = now_s = now_s + 10
        while policy.advise(replace(load(0.1), now_s=now_s)).verdict != "down":
            now_s += 1
        waited_s.append(now_s - start_s)
    return waited_s


def test_a_count_that_shrank_too_soon_shrinks_later_the_next_time() -> None:
    assert waits_s(replace(CONFIG, memory_s=1e6), 7) == [60, 120, 240, 480, 960, 960, 960]


def test_mistakes_are_forgotten() -> None:
    """Of two mistakes the first is forgotten while the second makes the count wait."""
    assert waits_s(replace(CONFIG, memory_s=1.0), 3) == [60, 60, 60]
    assert 120 < waits_s(replace(CONFIG, memory_s=300.0), 3)[2] < 240


@pytest.mark.parametrize(
    "wrong",
    [{"min_replicas": 0}, {"min_replicas": 9}, {"up_delay_s": -1.0}, {"clear_s": 0.0}, {"memory_s": 0.0}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got ReplicaConfig"):
        replace(CONFIG, **wrong)  # type: ignore[arg-type]


# Media


def media(tasks: Sequence[int], num_done: int = 0, num_threads: int = 2) -> list[MediaSample]:
    """A worker for each number of tasks."""
    return [MediaSample(f"m{number}", num_threads, each, num_done) for number, each in enumerate(tasks)]


def media_looks(
    policy: MediaReplicas, seconds: int, tasks: Sequence[int], per_s: float, start_s: int = 0
) -> ReplicaAdvice:
    """The last advice while each worker has so many tasks and ends so many each second."""
    advice = None
    for second in range(start_s, start_s + seconds):
        advice = policy.advise(float(second), media(tasks, int(per_s * second)))
    assert advice is not None
    return advice


def test_media_workers_follow_the_threads_at_work() -> None:
    """Both threads of both workers are always at work: 2 workers' worth, 2.4 with time to spare."""
    policy = MediaReplicas(ReplicaConfig(1, 8))
    assert media_looks(policy, 20, [2, 2], 1.0).num_replicas == 3
    assert "media need 2.4 workers" in media_looks(policy, 1, [2, 2], 1.0, 20).reason
    assert media_looks(policy, 400, [0, 0, 0], 0.0, 21).num_replicas == 1


def test_media_that_wait_ask_for_more() -> None:
    """Two threads end one task each second, so a task takes 2 s; 120 wait: 240 s of work in a minute."""
    advice = media_looks(MediaReplicas(ReplicaConfig(1, 8)), 60, [122], 1.0)
    assert advice.num_replicas == math.ceil((2 + 4) / 2 / 0.85)


def test_idle_media_workers_are_given_up_to_the_least() -> None:
    assert media_looks(MediaReplicas(ReplicaConfig(2, 8)), 100, [0, 0, 0, 0], 0.0).num_replicas == 2


def test_without_media_workers_nothing_is_known() -> None:
    policy = MediaReplicas(ReplicaConfig(1, 8))
    assert policy.advise(0.0, []).verdict == "unknown load"
    assert policy.advise(1.0, []).num_replicas == 1


def test_a_media_worker_started_anew_has_done_what_it_reports() -> None:
    policy = MediaReplicas(ReplicaConfig(1, 8))
    media_looks(policy, 60, [122], 1.0)
    advice = policy.advise(60.0, media([122], num_done=1))
    assert "media need 3.5 workers" in advice.reason


# A closed loop


def ramp(at_s: float) -> float:
    """0.4 requests a second, 1.8 for ten minutes, and 0.4 again."""
    up, down = (at_s - 200) / 200, (at_s - 1000) / 200
    return 0.4 + 1.4 * (min(max(up, 0.0), 1.0) - min(max(down, 0.0), 1.0))


def test_a_ramp_makes_three_encoders_of_one_and_one_again() -> None:
    loop = ClosedLoop("1e1p1d", ReplicaConfig(3, 8), ramp)
    loop.run(2400)
    assert loop.num_encoders[200] == 1
    assert max(loop.num_encoders) == 3
    assert loop.num_encoders[-1] == 1
    assert len(loop.changes) == 4
    assert loop.num_encoders[900:1000] == [3] * 100


@pytest.mark.parametrize("period_s", [60.0, 240.0])
def test_a_steady_wave_shorter_than_the_memory_changes_nothing(period_s: float) -> None:
    """The replicas of its peak stay."""
    loop = ClosedLoop("1e1p1d", ReplicaConfig(3, 8), wave(period_s))
    loop.run(2400)
    assert [at for at in loop.changes if at > 600] == []


def test_a_long_wave_is_followed_once_in_each_period() -> None:
    """Between 3 and 5 replicas: at most two steps up and two down, and no turn between them."""
    loop = ClosedLoop("1e1p1d", ReplicaConfig(3, 5), wave(1800.0))
    loop.run(5400)
    assert min(loop.num_encoders[1800:]) == 1
    assert max(loop.num_encoders) == 3
    for start_s in range(0, 5400, 1800):
        assert len([at for at in loop.changes if start_s <= at < start_s + 1800]) <= 4


def wave(period_s: float) -> Callable[[float], float]:
    """Between 0.3 and 1.9 requests a second."""
    return lambda at_s: 1.1 - 0.8 * math.cos(math.tau * at_s / period_s)


# Properties


@settings(max_examples=40, deadline=None)
@given(
    topology=st.sampled_from(["1e1p1d", "2e1p3d", "1ep1d", "1epd", "2e2p2d1pd"]),
    rates=st.lists(st.floats(0.0, 20.0), min_size=2, max_size=8),
    bounds=st.tuples(st.integers(1, 6), st.integers(0, 6)),
    step_s=st.sampled_from([1.0, 7.0, 90.0]),
)
def test_advice_keeps_its_bounds_and_its_delays(
    topology: str, rates: list[float], bounds: tuple[int, int], step_s: float
) -> None:
    """Whatever comes; two changes are at least the shorter delay apart."""
    config = ReplicaConfig(bounds[0], sum(bounds), up_delay_s=5.0, down_delay_s=60.0)
    policy = StageReplicas(config, parse_topology(topology))
    advice = []
    for number in range(10 * len(rates)):
        found = load(rates[number // 10], topology)
        advice.append(policy.advise(replace(found, now_s=number * step_s)))
    assert all(bounds[0] <= each.num_replicas <= sum(bounds) for each in advice)
    changed_s = [
        after.at_s for before, after in pairwise(advice) if after.num_replicas != before.num_replicas
    ]
    assert all(later - sooner >= 5.0 for sooner, later in pairwise(changed_s))


@settings(max_examples=40, deadline=None)
@given(usages=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), rate=st.floats(0.0, 0.5))
def test_replicas_never_fall_below_what_answers_under_way_fill(usages: list[float], rate: float) -> None:
    topology = f"1e1p{len(usages)}d"
    found = load(rate, topology)
    usage = {f"d{number}": each for number, each in enumerate(usages)}
    full = tuple(replace(each, kv_usage=usage.get(each.name)) for each in found.workers)
    advice = looks(StageReplicas(ReplicaConfig(3, 20), WANTED), replace(found, workers=full), 100)
    assert min(each.num_replicas for each in advice) >= 2 + math.ceil(sum(usages))
