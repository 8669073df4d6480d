"""What a search costs, in counted work, and no device left over."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epd.planning.goodput import Demand, rate_bound
from epd.planning.search import Planner
from epd.planning.space import Space
from epd.profiles.analytic import analytic_profile
from epd.serve_app.cli.program import app
from epd.simulate import Deployment, JobMaker, Simulation
from epd.simulate.records import SimulationResult
from epd.topology import parse_topology
from epd.workload.config import MixPart, WorkloadConfig
from epd.workload.metrics import SLO

PROFILE = analytic_profile("a100-80gb", "qwen2.5-vl-7b")


def planner(space: Space, num_requests: int) -> Planner:
    """Requests with a video of 10 to 30 s, the heaviest to search for."""
    part = MixPart.model_validate({"videos": "1", "video_s": "10..30", "output_tokens": "20..60"})
    config = WorkloadConfig(rate=1.0, num_requests=num_requests, mix=(part,))
    demand = Demand.of(list(JobMaker(PROFILE).jobs(config.resolve().requests(0))), SLO(2.6, 0.04))
    return Planner(PROFILE, demand, space, Deployment(parse_topology("1epd"), cpu_threads=64))


def test_a_search_of_eight_devices_simulates_few_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 requests instead of 250: few of the candidates are simulated."""
    events = [0]
    run = Simulation.run

    def counted(self: Simulation, *args: object, **kwargs: object) -> SimulationResult:
        try:
            return run(self, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            events[0] += self.events.num_happened

    monkeypatch.setattr(Simulation, "run", counted)
    found = planner(Space(8), 20).search()
    assert 688 < found.num_candidates < 688 + 200  # plain layouts, and mixes
    assert found.num_simulated < 688 / 8
    assert events[0] < 100_000


def test_bounds_are_those_of_each_candidate_alone() -> None:
    """Work that candidates share is computed once; whatever changes it must not be shared."""
    space = replace(Space(4, degrees=(1, 2)), retentions=(1.0, 0.5), decode_seqs=(1, 128))
    searched = planner(space, 10)
    candidates = searched.points.candidates()
    assert len({each.bound for each in candidates}) > 20
    for each in candidates:
        assert each.bound == rate_bound(PROFILE, each.deployment, searched.demand_of(each)), each.layout


@pytest.mark.parametrize("num_devices", [10, 9])  # equal cells, and two kinds of them
def test_all_devices_of_a_large_plan_are_used(
    num_devices: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("epd.planning.asked.MOST_REQUESTS", 10)
    options = ["--gpus", str(num_devices), "--slo-ttft-s", "2.6", "--slo-tpot-s", "0.04", "--json"]
    app(["plan", *options, "--workload", "images"], standalone_mode=False)
    plan = json.loads(capsys.readouterr().out)
    assert parse_topology(plan["topology"], 256).num_workers == num_devices
    assert plan["explanation"]["num_devices"] == num_devices
