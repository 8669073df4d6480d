"""The planner: the space, the search against trying everything, what binds, and when not to disaggregate.

Modules: `epd/planning/bounds.py`, `epd/planning/goodput.py`, `epd/planning/plan.py`,
`epd/planning/search.py`, `epd/planning/space.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

import epd
from benchmarks.published.table5 import paper_planner, paper_space
from epd.errors import InfeasibleError, RequestError
from epd.planning.asked import plan as planned
from epd.planning.bounds import bounds, outside
from epd.planning.goodput import MAX_LOAD, Demand, goodput, keeps, rate_bound, simulate_at
from epd.planning.plan import make_plan, verdict, what_binds
from epd.planning.search import LEAST_GAIN, Candidate, OnProgress, Planner, Scored, SearchResult
from epd.planning.space import (
    Settings,
    Space,
    cells_of,
    neighbours,
    splits_of,
    times,
    together,
)
from epd.profiles.analytic import analytic_profile
from epd.profiles.files import load_profile
from epd.profiles.profile import Profile
from epd.serve_app.cli.program import app
from epd.simulate import Deployment, JobMaker
from epd.simulate.kept_media import KeptMedia
from epd.topology import parse_topology
from epd.workload.config import MixPart, WorkloadConfig
from epd.workload.metrics import SLO
from tests.planning.layouts import mixes

PROFILE = analytic_profile("a100-80gb", "qwen2.5-vl-7b")
BASE = Deployment(parse_topology("1epd"), cpu_threads=64)
HEAVY = {"images": "1..3", "image_size": "1288x952", "output_tokens": "20..60"}
TEXT = {"text_tokens": "200..400", "output_tokens": "100"}


def demand(profile: Profile, slo: SLO, num: int = 30, **part: str) -> Demand:
    config = WorkloadConfig(rate=1.0, num_requests=num, mix=(MixPart.model_validate(part),))
    return Demand.of(list(JobMaker(profile).jobs(config.resolve().requests(0))), slo)


class SearchedOnce(Planner):
    """A planner whose search, the same each time, is made once."""

    @cache  # noqa: B019 # as long as the tests of this file
    def search(self, _on_progress: OnProgress | None = None) -> SearchResult:
        return super().search()


@cache
def planner(space: Space, slo: SLO, **part: str) -> Planner:
    """The same for all tests that ask the same."""
    return SearchedOnce(PROFILE, demand(PROFILE, slo, **part), space, BASE)


def test_topologies_of_three_devices_are_those_drawn() -> None:
    assert set(map(str, Space(3).topologies())) == {
        "1e1p1d", "2ep1d", "1ep2d", "1e2pd", "2e1pd", "2ed1p", "1ed2p", "3epd",
    }  # fmt: skip


def test_the_space_of_eight_holds_the_published_optima() -> None:
    """Table 5's 6E1P1D, the 5E2P1D of the experiments, and every split with one decoder."""
    for space in (Space(8), paper_space()):
        assert all(name in space for name in ("6e1p1d", "5e2p1d", "1e6p1d", "1e1p6d"))
    assert len(list(splits_of(8, (1, 1, 1)))) == 21
    assert "7ep1d" in Space(8)
    assert "7ep1d" not in paper_space()
    assert "5e2p2d" not in Space(8)


def test_many_devices_are_cells() -> None:
    assert [cells_of(num) for num in (1, 8, 9, 16, 100, 256)] == [
        ((1, 1),),
        ((1, 8),),
        ((1, 5), (1, 4)),
        ((2, 8),),
        ((9, 8), (4, 7)),
        ((32, 8),),
    ]
    for num in range(1, 257):
        assert sum(count * size for count, size in cells_of(num)) == num
    parts = [parse_topology(name) for name in ("2e1p1d", "1ed2p", "3e1d1p")]
    assert str(together(parts)) == "5e4p2d1ed"
    assert str(times(parse_topology("5e2p1d"), 32)) == "160e64p32d"
    for num in (0, 257):
        with pytest.raises(RequestError, match="1 to 256"):
            cells_of(num)


def best_plain(planner: Planner) -> float:
    """The goodput of the best plain layout, each simulated to the end."""
    return max(planner.goodput(each) for each in planner.points.candidates())


@pytest.mark.parametrize(
    ("num_devices", "slo", "part"),
    [
        (2, SLO(2.0, 0.05), HEAVY),
        (3, SLO(1.5, 0.04), HEAVY),
        (3, SLO(0.5, 0.02), TEXT),
    ],
)
def test_the_search_equals_trying_everything(num_devices: int, slo: SLO, part: dict[str, str]) -> None:
    space = Space(num_devices, encode_patches=(4096,), language_seqs=(64,), chunk_tokens=(512, 8192))
    small = Planner(PROFILE, demand(PROFILE, slo, 16, **part), space, BASE)
    found = small.search()
    assert found.winner.goodput >= best_plain(small) / LEAST_GAIN**2
    assert found.num_simulated < found.num_candidates
    assert found.runner_up is None or found.runner_up.goodput <= found.winner.goodput


@pytest.mark.parametrize(
    ("slo", "part", "layout"),
    [(SLO(1.5, 0.03), HEAVY, "1ed3ep"), (SLO(0.5, 0.02), TEXT, None)],
)
def test_no_mix_of_four_devices_beats_what_the_search_finds(
    slo: SLO, part: dict[str, str], layout: str | None
) -> None:
    """All 168 layouts with every sharding are simulated just above the answer; for images a mix wins."""
    space = Space(4, encode_patches=(4096,), language_seqs=(64,), chunk_tokens=(2048,))
    small = Planner(PROFILE, demand(PROFILE, slo, 20, **part), space, BASE)
    winner = small.search().winner
    every = small.points.fitting(
        (topology, each) for topology in mixes(4) for each in space.settings(topology)
    )
    assert {str(each.topology) for each in every} == set(map(str, mixes(4)))
    assert not any(small.goodput(each, LEAST_GAIN**2 * winner.goodput) for each in every)
    assert layout in (None, winner.candidate.layout)
    if layout is not None:
        assert winner.goodput > 1.1 * best_plain(small)


def test_steps_lead_from_every_layout_to_every_mix() -> None:
    assert (len(list(mixes(3))), len(list(mixes(4))), len(list(mixes(8)))) == (57, 168, 2871)
    assert set(map(str, Space(4).topologies())) < set(map(str, mixes(4)))
    reached = {"4epd"}
    queue = ["4epd"]
    while queue:
        near = {str(each) for each, _ in neighbours(parse_topology(queue.pop()))} - reached
        reached |= near
        queue += near
    assert reached == set(map(str, mixes(4)))


def test_a_step_keeps_all_devices() -> None:
    """A worker of two devices becomes another of two, but none of a kind that has one."""
    found = {
        str(topology): degrees for topology, degrees in neighbours(parse_topology("1e2pd"), (("pd", 2),))
    }
    assert found == {
        "1ed2pd": (("pd", 2),),
        "1ep2pd": (("pd", 2),),
        "1epd2pd": (("pd", 2),),
        "1e1ed1pd": (("ed", 2), ("pd", 2)),
        "1e1ep1pd": (("ep", 2), ("pd", 2)),
        "1e1epd1pd": (("epd", 2), ("pd", 2)),
        "1e1p1pd": (("p", 2), ("pd", 2)),
        "1e1pd1d": (("pd", 2), ("d", 2)),
    }


def test_goodput_is_the_edge_of_what_keeps_the_objectives() -> None:
    want = demand(PROFILE, SLO(1.5, 0.05), 100, **HEAVY)
    deployment = Settings(4096, 16, 128, 2048, "groups").deployment(parse_topology("2e2p1d"), BASE)
    rate = goodput(PROFILE, deployment, want)
    bound = rate_bound(PROFILE, deployment, want)
    assert 0 < rate <= MAX_LOAD * bound
    assert simulate_at(PROFILE, deployment, want, rate).attainment(want.slo) >= want.attainment
    beyond = simulate_at(PROFILE, deployment, want, rate + bound / 64)
    assert beyond.attainment(want.slo) < want.attainment or rate + bound / 64 > MAX_LOAD * bound


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "e2e_s"])
def test_a_verdict_that_comes_early_is_that_of_the_whole_run(name: str, share: float) -> None:
    """Also with the limit at what one request takes, just below and just above, where it alone decides."""
    want = replace(demand(PROFILE, SLO(), 20, **HEAVY), attainment=share)
    deployment = Settings(4096, 16, 128, 2048, "groups").deployment(parse_topology("1e1p1d"), BASE)
    rate = 0.8 * rate_bound(PROFILE, deployment, want)
    whole = simulate_at(PROFILE, deployment, want, rate)
    seconds = sorted(getattr(whole, name))
    decisive = round(share * len(seconds)) - 1
    limits_s = [seconds[place] + more for place in (0, decisive - 1, decisive) for more in (0, -1e-9, 1e-9)]
    verdicts = []
    for limit_s in limits_s:
        slo = SLO(**{name: limit_s})
        verdicts.append(keeps(PROFILE, deployment, replace(want, slo=slo), rate))
        assert verdicts[-1] == (whole.attainment(slo) >= share), limit_s
    assert set(verdicts) == {True, False}


@pytest.mark.parametrize("beside", [1.0, 1.4, 2.0])
def test_no_schedule_exceeds_the_bound(beside: float) -> None:
    """A hundred times the bound, all at once: the fleet is not done sooner than the bound allows."""
    profile = replace(PROFILE, beside=beside)
    want = demand(profile, SLO(ttft_s=1e6), 200, **HEAVY)
    for name in ("1e1p1d", "2ep1d", "1e2pd", "1ed2p", "2epd"):
        deployment = Settings(32768, 64, 128, 8192, "groups").deployment(parse_topology(name), BASE)
        bound = rate_bound(profile, deployment, want)
        result = simulate_at(profile, deployment, want, 100 * bound)
        done_s = result.rows["end"].max() / 1e12
        assert len(want.jobs) / done_s <= bound * 1.001, name


@pytest.mark.parametrize(
    ("slo", "words"),
    [(SLO(ttft_s=0.05), "TTFT binds"), (SLO(tpot_s=0.005), "TPOT binds")],
)
def test_an_impossible_objective_is_named(slo: SLO, words: str) -> None:
    with pytest.raises(InfeasibleError, match=words):
        planner(Space(3, chunk_tokens=(8192,)), slo, **HEAVY).search()


def test_weights_that_do_not_fit_bind() -> None:
    profile = analytic_profile("a100-80gb", "internvl2-26b")
    small = replace(profile, memory=replace(profile.memory, device_bytes=30 * 10**9))
    want = demand(small, SLO(ttft_s=5.0), 20, **HEAVY)
    with pytest.raises(InfeasibleError, match="memory binds: received a worker of the roles p"):
        Planner(small, want, Space(3), BASE).search()


def test_a_rate_that_is_too_high_binds() -> None:
    with pytest.raises(InfeasibleError, match=r"throughput binds: 1e\+06"):
        make_plan(planner(Space(2, language_seqs=(16,)), SLO(2.0, 0.05), **HEAVY), min_rate=1e6)


def test_a_refusal_advises_more_devices_than_there_are() -> None:
    """A rate just above what two devices serve: three are advised, never two."""
    found = make_plan(planner(Space(2, language_seqs=(16,)), SLO(2.0, 0.05), **HEAVY))
    with pytest.raises(InfeasibleError, match=r"take about 3 devices"):
        make_plan(
            planner(Space(2, language_seqs=(16,)), SLO(2.0, 0.05), **HEAVY), min_rate=1.01 * found.goodput
        )


def test_threads_that_read_media_bind_and_no_device_is_advised() -> None:
    """A minute of 1080p takes a thread 20 s: one thread reads one in that time, for any number of devices."""
    films = {"videos": "1", "video_s": "60", "video_size": "1920x1080"}
    base = replace(BASE, cpu_threads=1)
    one = SearchedOnce(PROFILE, demand(PROFILE, SLO(200.0), **films), Space(4), base)
    result = one.search()
    binding = what_binds(one, result.winner)
    assert binding.what == "reading media: 1 threads"
    assert binding.rate_per_s == pytest.approx(1.5e8 / (60 * 24 * 1920 * 1080))
    assert MAX_LOAD * binding.rate_per_s >= result.winner.goodput > 0
    work = demand(PROFILE, SLO(200.0), **films).jobs
    (beside,) = (
        bound
        for bound in bounds(PROFILE, replace(result.winner.candidate.deployment, video_gpus=1), work, SLO())
        if "media" in bound.what
    )
    assert (beside.what, beside.rate_per_s) == (
        "reading media: 1 threads and 1 GPUs",
        pytest.approx(25 * binding.rate_per_s),
    )
    with pytest.raises(InfeasibleError, match="--cpu-threads") as refused:
        make_plan(one, min_rate=60.0)
    assert "devices" not in str(refused.value)
    assert "reading media: 1 threads bind, which no split changes" in make_plan(one).verdict
    idle = replace(result, winner=replace(result.winner, goodput=0.5 * binding.rate_per_s))
    assert "latency binds before reading media: 1 threads do, which are 50% busy" in verdict(idle, binding)


def test_text_alone_is_not_disaggregated() -> None:
    """Without images encoders idle, and with an easy objective merged roles balance themselves."""
    plan = make_plan(planner(Space(3), SLO(5.0, 0.2), **TEXT))
    assert plan.verdict.startswith("do not split: ")
    assert plan.search.colocated is not None


def test_a_plan_says_what_it_rests_on() -> None:
    plan = make_plan(planner(Space(3, encode_patches=(4096,), language_seqs=(16,)), SLO(1.0, 0.03), **HEAVY))
    record = plan.record()["explanation"]
    assert any("analytic" in line for line in record["assumptions"])
    assert record["runner_up_lost_because"].startswith("at ")
    assert record["cost_per_thousand_requests"] == pytest.approx(
        3 * 1.8 / 3.6 / plan.winner.goodput, rel=1e-6
    )
    topology = parse_topology(plan.record()["topology"])
    assert [each["roles"] for each in record["memory"]] == [group.letters for group in topology.groups]
    peaks = [each for each in record["memory"] if each["roles"] != "e"]
    assert all(each["peak_bytes"] <= each["allowed_bytes"] == 72 * 10**9 for each in record["memory"])
    kv_bytes = plan.record()["settings"]["num_kv_tokens"] * PROFILE.memory.kv_bytes_per_token
    assert {each["kv_bytes"] for each in peaks} == {kv_bytes}


def test_a_plan_says_what_disk_it_rests_on() -> None:
    kept = replace(BASE, enable_prefix_caching=True, kept=KeptMedia(2e9, has_all=False))
    small = Planner(PROFILE, demand(PROFILE, SLO(5.0), 20, **HEAVY), Space(1, language_seqs=(16,)), kept)
    assert "a disk of 2000 MB/s has media that came before" in make_plan(small).assumptions


def test_a_disk_from_which_nothing_comes_back_is_refused() -> None:
    with pytest.raises(RequestError, match="received --cache-mb-per-s 5 and a workload in which no media"):
        planned(1, workload="images", cache_mb_per_s=5.0)


@pytest.mark.parametrize(("name", "kinds"), [("2e2pd", "pd"), ("1ed3ep", "ed and ep"), ("3ep1d", "ep")])
def test_at_the_bound_the_busiest_workers_have_no_time_left(name: str, kinds: str) -> None:
    """Kinds that share stages are busy together: what one of them leaves, the other does."""
    small = planner(Space(4), SLO(1.5, 0.03), **HEAVY)
    settings = Settings(4096, 64, 128, 2048, "groups")
    deployment = settings.deployment(parse_topology(name), BASE)
    bound = rate_bound(PROFILE, deployment, small.demand)
    scored = Scored(Candidate(deployment.topology, settings, deployment, bound), 0.5 * bound)
    binding = what_binds(small, scored)
    assert (binding.what, binding.rate_per_s) == (f"{kinds} workers", pytest.approx(bound))


def test_more_encoders_help_until_something_else_binds() -> None:
    paper = paper_planner()
    best = next(each for each in paper.points.candidates() if str(each.topology) == "6e1p1d")
    scaling = dict(paper.encoder_scaling(best))
    assert scaling[3] < scaling[5] < scaling[6] < scaling[7]


def test_fewer_tokens_are_a_choice_only_where_it_is_allowed() -> None:
    for retentions in ((1.0,), (1.0, 0.25)):
        space = Space(2, encode_patches=(32768,), language_seqs=(64,), retentions=retentions)
        found = planner(space, SLO(1.0, 0.05), **HEAVY).search()
        assert found.winner.candidate.settings.retention == retentions[-1]


def test_no_device_is_left_over() -> None:
    """Five devices in cells of three and two: all are laid out, with the settings of the first cell."""
    space = Space(3, encode_patches=(4096,), language_seqs=(16, 64), chunk_tokens=(2048, 8192))
    plan = make_plan(planner(space, SLO(2.0, 0.05), **HEAVY), cells=[(1, 3), (1, 2)])
    assert plan.topology.num_workers == 5
    first, second = plan.cells
    assert plan.told_verdict == f"each 3 devices: {plan.verdict}"  # whose requests it counts
    assert second.scored.candidate.settings == first.scored.candidate.settings
    assert plan.goodput == first.scored.goodput + second.scored.goodput > 0
    explained = plan.record()["explanation"]
    assert explained["num_devices"] == 5
    assert sum(each["num_cells"] for each in explained["cells"]) == 2
    assert plan.cost_per_thousand == pytest.approx(5 * 1.8 / 3.6 / plan.goodput)


def test_settings_that_a_layout_cannot_have_are_left_out() -> None:
    """Encoding at the prefill worker needs one that encodes."""
    local = Settings(4096, 16, 128, 2048, "local")
    space = Space(3, fixed=local)
    possible = {str(each) for each in space.topologies() if list(space.settings(each))}
    assert possible == {"2ep1d", "1ep2d", "3epd"}


def test_encode_and_decode_on_one_worker_are_simulated() -> None:
    """Prefill apart from everything else: both kinds of workers do their stages, and every request ends."""
    want = demand(PROFILE, SLO(ttft_s=1e6), 40, **HEAVY)
    deployment = Settings(4096, 16, 128, 2048, "groups").deployment(parse_topology("2ed1p"), BASE)
    bound = rate_bound(PROFILE, deployment, want)
    result = simulate_at(PROFILE, deployment, want, 0.5 * bound)
    assert not result.rows["is_refused"].any()
    assert (result.rows["adopted"] > 0).all()
    assert len(want.jobs) / (
        simulate_at(PROFILE, deployment, want, 100 * bound).rows["end"].max() / 1e12
    ) <= (bound * 1.001)


@pytest.fixture
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """`epd plan` simulates 30 requests instead of 250."""
    monkeypatch.setattr("epd.planning.asked.MOST_REQUESTS", 30)


def run(*options: str) -> object:
    return app(["plan", *options], standalone_mode=False)


def test_the_command_prints_a_plan_and_writes_it(
    few_requests: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    options = ["--gpus", "2", "--slo-ttft-s", "2", "--slo-tpot-s", "0.05", "--workload", "images"]
    run(*options, "--out", str(path))
    text = capsys.readouterr().out
    plan = yaml.safe_load(path.read_text())
    assert text.startswith(f"run {plan['topology']}")
    assert "per thousand requests" in text
    assert "of the device (weights" in text
    assert "split: " in text
    run(*options, "--json")
    assert json.loads(capsys.readouterr().out) == plan


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--gpus", "2", "--slo-ttft-s", "0.001"], 3, "TTFT binds"),
        (["--gpus", "0", "--slo-ttft-s", "1"], 2, "1 to 256"),
        (["--gpus", "2", "--slo-ttft-s", "1", "--attainment", "1.5"], 2, "attainment"),
        (["--gpus", "2", "--slo-ttft-s", "1", "--out", "/no/where/plan.yaml"], 2, "cannot write"),
    ],
)
def test_the_command_ends_with_its_exit_code(
    few_requests: None, options: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options) == code
    assert words in capsys.readouterr().err


def test_python_plans_as_the_command_does(few_requests: None, capsys: pytest.CaptureFixture[str]) -> None:
    run("--gpus", "2", "--slo-ttft-s", "3", "--seed", "2", "--json")
    assert epd.plan(2, slo_ttft_s=3.0, seed=2).record() == json.loads(capsys.readouterr().out)


def test_python_is_refused_what_the_command_is() -> None:
    with pytest.raises(RequestError, match="min retention is 0"):
        epd.plan(4, slo_ttft_s=1.0, min_retention=0)


def test_without_an_objective_a_plan_is_what_is_kept_up_with(few_requests: None) -> None:
    """More than within any objective, and still below what all workers could do."""
    free = epd.plan(2, workload="images")
    strict = epd.plan(2, workload="images", slo_ttft_s=0.4, slo_tpot_s=0.016)
    assert strict.goodput < free.goodput <= MAX_LOAD * free.binding.rate_per_s


def test_plain_replicas_are_always_a_candidate(few_requests: None) -> None:
    """Each by itself with its share of the threads: three of them serve three times what one does."""
    plan = make_plan(planner(Space(3, chunk_tokens=(2048,)), SLO(5.0, 0.2), **TEXT))
    alone = make_plan(planner(Space(1, chunk_tokens=(2048,)), SLO(5.0, 0.2), **TEXT))
    assert plan.search.replicas is not None
    assert 0.9 * alone.goodput <= plan.search.replicas.goodput <= alone.goodput
    assert plan.record()["explanation"]["replicas"]["topology"] == "3 x 1epd"
    assert plan.turns is not None
    assert "an objective below" in plan.turns


def test_a_profile_says_where_it_ends() -> None:
    """Prompts of 46,000 tokens against a profile that was measured to 8,192 at once."""
    profile = load_profile("benchmarks/results/gpu_profile.json")
    films = {"videos": "2", "video_s": "600"}
    jobs = demand(profile, SLO(), 2, **films).jobs
    lines = list(outside(profile, BASE, jobs))
    assert any(line.startswith("prefill is extrapolated: ") and "token pairs" in line for line in lines)
    assert not list(outside(PROFILE, BASE, demand(PROFILE, SLO(), 2, **TEXT).jobs))
