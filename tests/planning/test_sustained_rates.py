"""A plan says a rate that its layout keeps up with, however short requests and long objectives are."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from epd.planning.asked import planner_for
from epd.planning.goodput import Demand, goodput, simulate_at
from epd.planning.search import Planner
from epd.planning.space import Space
from epd.profiles.analytic import Efficiency, analytic_profile
from epd.profiles.cost import StageTable
from epd.simulate import Deployment, JobMaker
from epd.simulate.clock import TICKS_PER_S
from epd.simulate.requests import Job
from epd.topology import parse_topology
from epd.workload.config import WorkloadConfig, load_workload
from epd.workload.metrics import SLO

ROOFLINE = analytic_profile("h100", "qwen2.5-vl-7b", Efficiency(compute=0.5, launch_s=0.0, replay_s=0.0))


def and_each_call(table: StageTable, fixed_s: float) -> StageTable:
    return replace(table, cost=replace(table.cost, fixed_s=fixed_s))


PROFILE = replace(
    ROOFLINE,
    encode=and_each_call(ROOFLINE.encode, 0.003),
    prefill=and_each_call(ROOFLINE.prefill, 0.002),
    decode=and_each_call(ROOFLINE.decode, 0.002),
)
SHORT = load_workload("images")  # a few hundred requests are over before a queue is 2.6 s long
PATIENT = SLO(ttft_s=2.6)


def jobs_of(config: WorkloadConfig, num_requests: int) -> list[Job]:
    fields = {"num_requests": num_requests}
    return list(JobMaker(PROFILE).jobs(config.model_copy(update=fields).resolve().requests(0)))


def planner(num_requests: int = 250, slo: SLO = PATIENT, num_devices: int = 1) -> Planner:
    return planner_for(PROFILE, jobs_of(SHORT, num_requests), slo, Space(num_devices))


def few_sequences(topology: str) -> Deployment:
    base = Deployment(parse_topology(topology), cpu_threads=64)
    return replace(base, language=replace(base.language, max_num_seqs=16))


def test_a_rate_that_is_found_is_kept_for_eight_times_as_long() -> None:
    """Sixteen sequences a worker bind, which no bound knows, and 250 requests are over before one waits."""
    searched, layout = planner().demand, few_sequences("4epd")
    found = goodput(PROFILE, layout, searched)
    many = Demand.of(jobs_of(SHORT, 8 * len(searched.at(found))), PATIENT)
    times_s = simulate_at(PROFILE, layout, many, found / 1.2).ttft_s
    assert max(times_s) < 0.5
    assert goodput(PROFILE, layout, replace(searched, settle_s=0.0, alone_s=())) > 2 * found


def test_a_layout_keeps_up_where_there_is_no_objective_for_the_first_token() -> None:
    """As where that is never missed. In 20 s more come than either would be judged by: both are the same."""
    patient, free = (
        goodput(PROFILE, few_sequences("1epd"), replace(planner(slo=slo).demand, settle_s=20.0))
        for slo in (SLO(1e3, 0.5), SLO(tpot_s=0.5))
    )
    assert free == patient


def test_requests_that_come_again_have_new_content() -> None:
    searched = planner(20).demand
    jobs = searched.at(100.0)
    assert len(jobs) == math.ceil(100 * searched.settle_s) > 2 * 20
    assert [job.index for job in jobs] == list(range(len(jobs)))
    assert len({job.media_key for job in jobs}) == len({job.text_key for job in jobs}) == len(jobs)
    assert all(earlier.due <= later.due for earlier, later in pairwise(jobs))
    assert jobs[21].groups == jobs[1].groups


def test_new_content_has_keys_that_a_cache_can_hold() -> None:
    """Which are below 2 ** 63, also of requests whose own are the largest."""
    searched = planner(20).demand
    largest = replace(
        searched, jobs=[replace(job, media_key=2**63 - 1, text_key=2**62) for job in searched.jobs]
    )
    cached = replace(few_sequences("1epd"), enable_prefix_caching=True)
    assert len(simulate_at(PROFILE, cached, largest, 100.0).ttft_s) > 2 * 20


def test_the_objective_alone_binds_where_twice_the_requests_show_a_queue() -> None:
    searched = planner(250).demand
    jobs = searched.at(15.0)
    assert 250 < len(jobs) < 500
    assert min(searched.first_token_ticks(jobs)) == TICKS_PER_S * 2.6
    assert len(searched.at(300.0)) == 500


def test_requests_that_are_heavy_alone_are_not_late_for_it() -> None:
    """One of a mix takes many times as long as the mean, whatever the load."""
    config = load_workload("mixed")
    searched = planner_for(PROFILE, jobs_of(config, 250), SLO(2.6, 0.04), Space(1)).demand
    assert max(searched.alone_s) > 5 * sorted(searched.alone_s)[len(searched.alone_s) // 2]
    jobs = searched.at(20.0)
    limits = searched.first_token_ticks(jobs)
    assert all(
        ticks >= 2e12 * min(1.3, alone) for ticks, alone in zip(limits, searched.alone_s, strict=False)
    )
