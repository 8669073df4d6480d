"""Roles that follow the load of a running service: what is estimated, and what becomes of decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.control.elasticity.cluster import ClusterTraffic
from epd.control.elasticity.controller import ControllerConfig, RoleController, Switch
from epd.control.recent import Arrivals
from epd.errors import UnavailableError
from epd.kv.pass_limits import SchedulerConfig
from epd.machine import steady_time_s
from epd.sampling_params import SamplingParams
from epd.serve_app.messages import WorkerLoad
from epd.serve_app.orchestration.elastic import ElasticityLoop
from epd.serve_app.role_messages import Onload
from epd.serve_app.worker_info import WorkerInfo
from tests.serve_app.deployments import Deployment, Question, deployed
from tests.serve_app.orchestration.parts import shared_parts
from tests.serve_app.orchestration.test_role_switch import on_message, roles

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

QUICK = ControllerConfig(interval_s=0.05)


class ScriptedController(RoleController):
    """Decides what it is told to, once, and keeps what it saw."""

    def __init__(self, switch: Switch) -> None:
        super().__init__(QUICK)
        self.switches = [switch]
        self.loads: list[ClusterTraffic] = []
        self.endings: list[tuple[str, str]] = []

    def decide(self, now_s: float, load: ClusterTraffic) -> Switch | None:
        super().decide(now_s, load)
        self.loads.append(load)
        return self.switches.pop() if self.switches and load.is_known else None

    def succeeded(self, _now_s: float, worker: str, load_s: float | None = None) -> None:
        self.endings.append(("succeeded", worker))
        self.load_s = load_s

    def failed(self, _now_s: float, worker: str) -> None:
        self.endings.append(("failed", worker))


def scripted(deployment: Deployment) -> ScriptedController:
    """Takes the place of the controller before the service starts."""
    controller = ScriptedController(Switch("e1", roles("d")))
    deployment.service.elastic.controller = controller
    return controller


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture
def questions(media: dict[str, Path]) -> list[Question]:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    kinds = (("image",), ("video",), (), ("image", "tall_video"))
    return [
        Question(tuple(media[name] for name in kinds[number % 4]), f"what {number}?", params)
        for number in range(8)
    ]


@pytest.mark.parametrize("is_failing", [False, True])
def test_what_is_decided_is_done_and_told_how_it_ended(
    is_failing: bool, checkpoints: dict[str, Path], questions: list[Question]
) -> None:
    def fail(_: Onload) -> None:
        raise UnavailableError("this is a test")

    async def run() -> None:
        deployment = Deployment(checkpoints["qwen2_5_vl"], "2e1p1d", {}, elastic=QUICK)
        controller = scripted(deployment)
        await deployment.service.start()
        try:
            with on_message(deployment, Onload, fail if is_failing else print):
                await deployment.ask_all(questions)
                await until(lambda: controller.endings)
            outcome = "failed" if is_failing else "succeeded"
            assert controller.endings == [(outcome, "e1")]
            assert deployment.fleet.workers["e1"].roles == roles("e" if is_failing else "d")
            status = await deployment.service.status()
            assert status.decisions
            assert bool(status.switches[-1].error) == is_failing
            if not is_failing:
                last = status.switches[-1]
                assert controller.load_s == last.onload_s + last.announce_s > 0
            await deployment.ask_all(questions)
            await deployment.settle()
        finally:
            await deployment.service.close()

    asyncio.run(run())


def test_the_estimate_is_made_of_what_workers_report(
    checkpoints: dict[str, Path], questions: list[Question]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e1p1d") as deployment:
            service, elastic = deployment.service, deployment.service.elastic
            elastic.estimator.observe(steady_time_s(), elastic.samples())
            answers = await deployment.ask_all(questions)
            await deployment.settle()
            samples = {each.name: each for each in elastic.samples()}
            assert samples.keys() == {"e0", "e1", "p0", "d0"}
            encoded = sum(samples[name].stages["encode"].done_units for name in ("e0", "e1"))
            plans = [work for _, work in deployment.service.recent_load()]
            assert len(plans) == len(questions)
            assert 0 < encoded <= sum(work.num_patches for work in plans)
            ends = [answer.end for answer in answers if answer.end]
            prompts = sum(end.usage.prompt_tokens - end.cached_tokens for end in ends)
            assert samples["p0"].stages["prefill"].done_units == prompts
            # The first token of each answer comes with its prompt, the last one is never computed.
            assert samples["d0"].stages["decode"].done_units == len(questions) * (30 - 1)
            assert all(
                sample.busy_s > 0 and sample.queued_units == 0
                for each in samples.values()
                for sample in each.stages.values()
                if sample.done_units
            )
            elastic.estimator.follow(steady_time_s(), service.arrivals)
            load = elastic.estimator.observe(steady_time_s(), elastic.samples())
            assert load.is_known
            assert all(stage.need.request_s > 0 for stage in load.stages.values())

    asyncio.run(run())


async def unused(*_: object) -> Any:
    """No role is switched."""


def test_what_a_worker_has_room_for_ends_with_its_seats_too() -> None:
    fleet: Any = SimpleNamespace(workers={name: WorkerInfo(name, roles("d")) for name in ("d0", "d1", "d2")})
    loads = {
        "d0": WorkerLoad(kv_usage=0.1, seq_usage=0.75),
        "d1": WorkerLoad(kv_usage=0.5, seq_usage=0.25),
    }
    shared = shared_parts(fleet, loads=loads)
    shared.requests.switching.add("d1")
    elastic = ElasticityLoop(shared, Arrivals(), None, unused, lambda: True)
    samples = elastic.samples()
    assert [(each.kv_usage, each.is_switching) for each in samples] == [
        (0.75, False),
        (0.5, True),
        (None, False),
    ]


def test_seats_are_told(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            long = Question((), "what?", SamplingParams(max_tokens=40, ignore_eos=True))
            deployment.held.is_on = True
            asking = asyncio.create_task(deployment.ask_all([long, long]))
            loads = deployment.service.requests.loads
            most = SchedulerConfig().max_num_seqs
            await until(lambda: "d0" in loads and loads["d0"].seq_usage == 2 / most)
            deployment.held.is_on = False
            await asking
            await deployment.settle()

    asyncio.run(run())
