"""Role switching in the simulator: the paper's load, loads that come and go, switches that fail.

Modules: `epd/simulate/clock.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from benchmarks.elasticity.load_waves import LoadWave, day, requests_of, sine_wave, square_wave
from benchmarks.published.paper import (
    FOUR_K,
    TABLE_6_ELASTICITY,
    TABLE_6_SHAPES,
    Experiment,
    limits,
    paper_deployment,
    paper_profile,
)
from epd.control.elasticity.controller import ControllerConfig, Switch
from epd.kv.pass_limits import SchedulerConfig
from epd.profiles.profile import Profile
from epd.simulate import Deployment, Job, JobMaker, Simulation, SimulationResult
from epd.simulate.placement import Elasticity
from epd.topology import STAGES, Stage, parse_topology, role_letters
from epd.workload.metrics import SLO
from epd.workload.requests import RequestShape

PROFILE = paper_profile()
# 1.3 s of encoding, or about 1.6 s of decoding in a full batch.
PICTURES = RequestShape(50, 40, (FOUR_K,) * 3)
TALK = RequestShape(200, 400)
ALWAYS = Elasticity()


def deployment(topology: str) -> Deployment:
    return Deployment(parse_topology(topology), language=limits(8), decode=limits(128), cpu_threads=64)


def jobs(tides: list[LoadWave], duration_s: float, seed: int = 0, profile: Profile = PROFILE) -> list[Job]:
    return list(JobMaker(profile, "frames").jobs(requests_of(tides, duration_s, seed)))


def simulate(
    topology: str, work: list[Job], elasticity: Elasticity | None = ALWAYS
) -> tuple[SimulationResult, Simulation]:
    """The result, after which nothing is left anywhere and every request has ended."""
    simulation = Simulation(PROFILE, deployment(topology), elasticity=elasticity)
    result = simulation.run(work)
    assert sorted(result.rows["index"]) == [job.index for job in work]
    for worker in simulation._workers.values():
        assert not worker.has_work()
        assert not simulation._is_expected(worker.name)
        if worker.language is not None:
            worker.language.scheduler.check_integrity()
            assert worker.language.kv.usage == 0
    assert {stage for worker in simulation._workers.values() for stage in worker.roles} == set(STAGES)
    return result, simulation


def text_after_pictures(at_s: float) -> list[LoadWave]:
    return [
        LoadWave(PICTURES, lambda now_s: 2.0 if now_s < at_s else 0.1, 2.0),
        LoadWave(TALK, lambda now_s: 0.2 if now_s < at_s else 2.4, 2.4),
    ]


# The paper's load


def test_table_6_twice_as_fast_as_static_and_nothing_lost() -> None:
    """5E1P2D becomes 2E1P5D while requests come; the paper: 61.1 s without switching, 28.0 s with it."""
    latencies = []
    for elasticity in (None, TABLE_6_ELASTICITY):
        experiment = Experiment(paper_deployment("5e1p2d"), 3.0, TABLE_6_SHAPES, elasticity)
        runs = [experiment.run(PROFILE, number) for number in range(3)]
        assert not any(run.rows["is_refused"].any() or (run.rows["end"] < 0).any() for run in runs)
        latencies.append(np.mean([run.e2e_s.mean() for run in runs]))
    assert latencies[0] / latencies[1] > 2.2


def test_table_6_without_knowing_how_long_answers_get() -> None:
    """Requests allow 4096 tokens and get 50 or 500: what is generated tells."""
    experiment = Experiment(paper_deployment("5e1p2d"), 3.0, TABLE_6_SHAPES, Elasticity(max_tokens=4096))
    result = experiment.run(PROFILE)
    static = Experiment(paper_deployment("5e1p2d"), 3.0, TABLE_6_SHAPES).run(PROFILE)
    assert static.e2e_s.mean() / result.e2e_s.mean() > 2.2
    last_s = result.rows["due"].max() / 1e12
    assert len([roles for at_s, _, roles in result.switches if at_s < last_s and roles == "d"]) in (3, 4)


# Loads that change


def test_workers_follow_a_load_that_changes_for_good() -> None:
    work = jobs(text_after_pictures(200.0), 560.0)
    follows, simulation = simulate("4e1p3d", work)
    stays, _ = simulate("4e1p3d", work, None)
    assert follows.e2e_s.mean() < 0.5 * stays.e2e_s.mean()
    assert len(follows.switches) <= 6
    assert [role_letters(each.roles) for each in simulation._workers.values()].count("d") >= 5


def test_a_day_is_served_better_than_by_the_best_layout_in_hindsight() -> None:
    """Pictures before noon, long answers after it, whose length nobody knows; eight devices. On these four
    layouts the best of all 21 is among, see benchmarks/elasticity/elasticity.py."""
    slo = SLO(ttft_s=6.0, tpot_s=0.08)
    work = jobs(day(PICTURES, TALK, 2.4, 900.0), 900.0)
    static = [
        simulate(topology, work, None)[0].attainment(slo)
        for topology in ("2e1p5d", "3e1p4d", "4e1p3d", "5e1p2d")
    ]
    switched, _ = simulate("3e1p4d", work, Elasticity(max_tokens=1024))
    assert max(static) < 0.9
    assert switched.attainment(slo) >= max(static) + 0.05


WAVES: list[Callable[..., Callable[[float], float]]] = [square_wave, sine_wave]


# Two that a peak of noise made twice as slow: encoders were kept that no peak needed.
@example(square_wave, 271.1288686889933, 0.06608241793053372, 2.1391440542722564, 1.5062189444888725, 2)
@example(square_wave, 166.28522781786276, 0.9352758069942098, 2.003888880110488, 1.8728708676573516, 248)
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    wave=st.sampled_from(WAVES),
    period_s=st.floats(2.0, 300.0),
    phase=st.floats(0.0, 1.0),
    pictures=st.floats(0.2, 2.2),
    talk=st.floats(0.3, 2.5),
    seed=st.integers(0, 1000),
)
def test_no_periodic_load_makes_them_oscillate_or_much_slower(
    wave: Callable[..., Callable[[float], float]],
    period_s: float,
    phase: float,
    pictures: float,
    talk: float,
    seed: int,
) -> None:
    """On a layout that bears both peaks, so that whoever stays as he is does well."""
    tides = [
        LoadWave(PICTURES, wave(0.2, pictures, period_s, phase), pictures),
        LoadWave(TALK, wave(0.3, talk, period_s, phase + 0.5), talk),
    ]
    work = jobs(tides, 300.0, seed)
    switched, _ = simulate("3e1p4d", work)
    static, _ = simulate("3e1p4d", work, None)
    times_s = [at_s for at_s, *_ in switched.switches if at_s < 300.0]
    assert all(sum(start_s <= at_s < start_s + 60 for at_s in times_s) <= 5 for start_s in range(300))
    assert len(times_s) <= 12
    assert switched.e2e_s.mean() < 1.5 * static.e2e_s.mean() + 1.0


@pytest.mark.parametrize("period_s", [320.0, 420.0])
def test_waves_longer_than_the_memory_of_peaks_are_hardly_slower(period_s: float) -> None:
    """A peak that comes back when its need was just forgotten: 26 s instead of 18 once, at 420 s."""
    tides = [
        LoadWave(PICTURES, square_wave(0.2, 2.2, period_s), 2.2),
        LoadWave(TALK, square_wave(0.3, 2.5, period_s, 0.5), 2.5),
    ]
    work = jobs(tides, 900.0)
    static, switching = (simulate("3e1p4d", work, each)[0] for each in (None, Elasticity(max_tokens=1024)))
    assert switching.e2e_s.mean() <= 1.1 * static.e2e_s.mean()


# Switches that fail


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(failing=st.lists(st.booleans(), min_size=1, max_size=6), seed=st.integers(0, 100))
def test_switches_that_fail_midway_leave_a_topology_that_works(failing: list[bool], seed: int) -> None:
    """The worker has drained and handed over what it had, and must take its old roles again."""
    asked: list[Switch] = []

    def fails(switch: Switch) -> bool:
        asked.append(switch)
        return failing[(len(asked) - 1) % len(failing)]

    work = jobs(text_after_pictures(40.0), 100.0, seed)
    result, simulation = simulate("5e1p2d", work, Elasticity(is_failing=fails))
    assert asked
    num_failed = sum(failing[number % len(failing)] for number in range(len(asked)))
    assert len(result.switches) == len(asked) - num_failed
    assert not result.rows["is_refused"].any()
    assert not any(worker.is_switching for worker in simulation._workers.values())
    if all(failing):
        assert [each.roles for each in simulation._workers.values()] == [
            each.roles for each in parse_topology("5e1p2d").workers()
        ]


def test_a_worker_that_leaves_hands_over_all_it_has() -> None:
    """Decoders with hundreds of tokens to go are free within seconds, though encoders are behind."""
    begun: dict[str, float] = {}
    tides = [
        LoadWave(TALK, lambda now_s: 2.0 if now_s < 60 else 0.1, 2.0),
        LoadWave(PICTURES, lambda now_s: 0.1 if now_s < 60 else 2.2, 2.2),
    ]
    work = jobs(tides, 200.0)
    simulation = Simulation(PROFILE, deployment("2e2p4d"), elasticity=ALWAYS)
    assert simulation._switcher is not None
    decide = simulation._switcher.controller.decide

    def noted(now_s: float, load: object) -> Switch | None:
        switch = decide(now_s, load)  # type: ignore[arg-type]
        if switch is not None:
            begun[switch.worker] = now_s
        return switch

    simulation._switcher.controller.decide = noted  # type: ignore[method-assign]
    result = simulation.run(work)
    took_s = [at_s - begun[worker] for at_s, worker, _ in result.switches if worker in begun]
    assert took_s
    assert max(took_s) < 5.0


# The same estimate, whatever is known


@pytest.mark.parametrize("stage", STAGES)
def test_the_simulator_learns_what_the_profile_says(stage: Stage) -> None:
    """With no profile the estimator comes to the costs that it has with one."""
    work = jobs([LoadWave(PICTURES, lambda _: 1.0, 1.0), LoadWave(TALK, lambda _: 1.0, 1.0)], 60.0)
    needs = []
    for is_told in (True, False):
        elasticity = Elasticity(ControllerConfig(roles=()))
        simulation = Simulation(PROFILE, deployment("3e1p4d"), elasticity=elasticity)
        assert simulation._switcher is not None
        if not is_told:
            simulation._switcher.estimator = type(simulation._switcher.estimator)()
        estimator, loads = simulation._switcher.estimator, []
        observe = estimator.observe
        estimator.observe = lambda *a, _o=observe, _l=loads, **k: _l.append(_o(*a, **k)) or _l[-1]  # type: ignore
        simulation.run(work)
        needs.append(loads[50].stages[stage].need.request_s)
    assert needs[1] == pytest.approx(needs[0], rel=0.15)
    assert needs[0] > 0


# Forwarding on demand


def test_no_queue_is_built_at_a_worker_that_is_full() -> None:
    """Two decode workers with two seats each: the fifth request waits with nobody until a seat comes free."""
    seats = SchedulerConfig(max_num_seqs=2)
    profile_jobs = jobs([LoadWave(TALK, lambda _: 5.0, 5.0)], 4.0)
    simulation = Simulation(PROFILE, Deployment(parse_topology("1e1p2d"), decode=seats))
    most = {"d0": 0, "d1": 0}
    passed = simulation._passed

    def noted(worker, result):  # type: ignore[no-untyped-def]
        passed(worker, result)
        for name in most:
            side = simulation._workers[name].language
            assert side is not None
            most[name] = max(most[name], side.num_requests)
            assert not side.scheduler.waiting

    for worker in simulation._workers.values():
        worker._on_passed = noted
    rows = simulation.run(profile_jobs).rows
    assert most == {"d0": 2, "d1": 2}
    # Whoever waited was placed when a seat came free: at the very instant that an answer ended.
    late = rows[rows["placed"] > rows["due"]]
    assert len(late) > 5
    assert set(late["placed"]) <= set(rows["end"])


def test_a_stale_report_sends_nobody_to_a_full_worker() -> None:
    """The router believes that d0 has nothing to do; it is asked, refuses, and the next one is taken."""
    simulation = Simulation(
        PROFILE, Deployment(parse_topology("1e1p2d"), decode=SchedulerConfig(max_num_seqs=1))
    )
    work = jobs([LoadWave(TALK, lambda _: 2.0, 2.0)], 2.0)[:2]
    assert len(work) == 2
    begin = simulation._begin

    def stale(state):  # type: ignore[no-untyped-def]
        begin(state)
        simulation.router.add("d0", num_decodes=-1)
        simulation.router.add("d1", num_decodes=5)

    simulation._placer._on_placed = stale
    rows = simulation.run(work).rows
    assert (rows["placed"] == rows["due"]).all()
