"""Retention by load in the simulator: a ramp that no higher retention survives, and one that needs none."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.score.calibrating import kept_job
from epd.control.retention import RetentionConfig
from epd.profiles.analytic import analytic_profile
from epd.profiles.cost import StageCost
from epd.profiles.media import MediaWork
from epd.profiles.profile import Profile
from epd.simulate import Deployment, Job, SimulationResult
from epd.simulate.clock import ticks_of
from epd.simulate.requests import GroupWork
from epd.topology import parse_topology
from epd.workload.metrics import SLO
from tests.simulate.retained import RetainingSimulation, SimulatedRetention

SLO_S = 4.0
CONFIG = RetentionConfig(SLO_S)
# 8 groups of 256 tokens.
GROUPS = (GroupWork(MediaWork(64, 256), 0),) * 8


def profile(encode_s: float) -> Profile:
    """Prefill 20 ms and 1/4 ms per token: 0.54 s a prompt with all tokens, 0.08 s with a tenth of them."""
    base = analytic_profile("a100-80gb", "minicpm-v-2.6")
    return replace(
        base,
        encode=replace(base.encode, cost=StageCost(encode_s, 0.0, 0.0, 0.0)),
        prefill=replace(base.prefill, cost=StageCost(0.02, 0.0, 0.25e-3, 0.0)),
        decode=replace(base.decode, cost=StageCost(0.004, 0.0, 0.0, 0.0)),
        transfer=replace(base.transfer, cost=StageCost(0.001, 0.0, 0.0, 0.0)),
    )


def ramp(peak: float, seed: int, base: float = 0.8) -> list[Job]:
    """Calm for 20 s, rising for 20, at the peak for 30, falling for 20, calm for 30; per second."""
    rng, now_s = random.Random(seed), 0.0
    jobs: list[Job] = []
    while (now_s := now_s + rng.expovariate(peak)) < 120:
        share = min(max(min((now_s - 20) / 20, (90 - now_s) / 20), 0.0), 1.0)
        if rng.random() * peak < base + (peak - base) * share:
            index = len(jobs)
            jobs.append(Job(index, ticks_of(now_s), GROUPS, 20, 6, index, index))
    return jobs


def simulate(
    jobs: list[Job], config: RetentionConfig, topology: str = "1epd", encode_s: float = 1e-3
) -> tuple[SimulationResult, SimulatedRetention]:
    """A config of one level is a fixed retention."""
    retention = SimulatedRetention(config, num_prefillers=1)
    deployment = Deployment(parse_topology(topology), max_wait_s=SLO_S, max_batch_patches=512)
    return RetainingSimulation(profile(encode_s), deployment, retention).run(jobs), retention


@pytest.mark.parametrize(("seed", "topology"), [(0, "1epd"), (1, "1epd"), (2, "1e1p1d")])
def test_a_ramp_is_kept_as_well_as_by_the_best_fixed_retention_and_more_is_kept(
    seed: int, topology: str
) -> None:
    """At the peak 0.15 of the tokens take nine tenths of the time, a quarter of them more than all of it."""
    jobs = ramp(9.0, seed)
    slo = SLO(ttft_s=SLO_S)
    fixed = {
        level: simulate(jobs, replace(CONFIG, levels=(level,)), topology)[0].attainment(slo)
        for level in CONFIG.levels
    }
    result, retention = simulate(jobs, CONFIG, topology)
    attained = result.attainment(slo)
    best = max(fixed.values())
    assert attained >= best
    assert best > fixed[0.25] + 0.05 > fixed[1.0]
    least_that_does = max(level for level in fixed if fixed[level] == best)
    assert mean(retention.levels.values()) > 1.3 * least_that_does
    assert max(retention.levels.values()) == 1.0
    assert retention.controller.num_changes <= CONFIG.max_changes(120)


def test_without_a_ramp_little_is_dropped() -> None:
    """Chance brings several prompts at once even so."""
    _, retention = simulate(ramp(0.8, 0), CONFIG)
    assert mean(retention.levels.values()) > 0.8


def test_what_is_dropped_for_an_encoder_that_is_too_slow_comes_back() -> None:
    """A second of encoding for each request, of which two come every second: dropping helps nobody."""
    jobs = ramp(2.0, 0, base=2.0)
    slow, retention = simulate(jobs, CONFIG, "1e1p1d", encode_s=1.0)
    assert slow.attainment(SLO(ttft_s=SLO_S)) < 0.5
    levels = list(retention.levels.values())
    assert levels[-1] > 2 * min(levels)


@pytest.mark.parametrize(("retention", "tokens"), [(1.0, 2048), (0.5, 1024), (0.15, 307), (0.05, 102)])
def test_a_job_keeps_its_share_of_tokens_and_all_patches(retention: float, tokens: int) -> None:
    job = Job(0, 0, GROUPS, 20, 6, 0, 0)
    kept = kept_job(job, retention)
    assert kept.num_visual_tokens == tokens
    assert kept.num_patches == job.num_patches
