"""The leading front's estimate counts the requests of all fronts, and its advice reaches every process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.control.elasticity.replicas import ReplicaConfig
from epd.sampling_params import SamplingParams
from epd.serve_app import composition
from epd.serve_app.orchestration.elastic import ReplicaAdvisor
from tests.serve_app.deployments import NEVER_S, Question, undisturbed
from tests.serve_app.network.cluster import clustered
from tests.serve_app.network.test_cluster import settled, topology_seen, until

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return [Question((media["image"],) if number % 2 else (), f"{number}?", params) for number in range(12)]


def test_requests_of_all_fronts_count_and_all_see_the_advice(
    checkpoints: dict[str, Path], questions: list[Question]
) -> None:
    async def run() -> None:
        async with clustered(checkpoints["qwen2_5_vl"], "1e1p1d", num_fronts=2) as cluster:
            leader, other = cluster.fronts
            for front in cluster.fronts:
                front.service.elastic.advisor = ReplicaAdvisor(ReplicaConfig(up_delay_s=0.0), settle_s=0.0)
            await until(lambda: topology_seen(leader) == topology_seen(other) == "1e1p1d")
            cluster.stages[0].membership.set(bounds=(3, 8))
            await until(lambda: leader.service.elastic.advisor.is_wanted)
            await asyncio.sleep(1.1)  # work is measured between two looks
            await other.ask_all(questions)
            await until(lambda: len(leader.service.recent_load()) == len(questions))
            mine, its = leader.service.recent_load(), other.service.recent_load()
            for name in ("num_patches", "num_prompt_tokens", "max_tokens"):
                assert sum(getattr(work, name) for _, work in mine) == sum(
                    getattr(work, name) for _, work in its
                )
            assert sum(bool(work.num_patches) for _, work in mine) == len(questions) // 2
            members = [*(each.membership for each in cluster.stages), other.fleet.membership]
            await until(lambda: all("Stage" in each.view.advice for each in members))
            given = cluster.stages[0].membership.view.advice["Stage"]
            assert 3 <= given.num_replicas <= 8
            for front in cluster.fronts:
                status = await front.service.status()
                assert "of 3 to 8 replicas" in status.advice["Stage"].reason
            # The other one leads on, with the advice that was given.
            await leader.kill()
            await until(lambda: other.service.switcher.leads)
            assert "Stage" in other.service.elastic.advisor.advice

    asyncio.run(run())


def test_traffic_makes_no_new_view_for_workers(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        async with clustered(checkpoints["qwen2_5_vl"], "1epd", num_fronts=2) as cluster:
            leader, other = cluster.fronts
            await until(lambda: topology_seen(leader) == topology_seen(other) == "1epd")
            board = cluster.board.board
            assert board is not None
            await until(lambda: cluster.stages[0].membership.view.version == board._version)
            version = cluster.stages[0].membership.view.version
            await other.ask(Question((), "well?", SamplingParams(max_tokens=2)))
            await until(lambda: len(leader.service.recent_load()) == 1)
            assert cluster.stages[0].membership.view.version == version

    asyncio.run(run())


@pytest.mark.parametrize("is_leaving_at_once", [True, False])
def test_the_last_worker_of_a_stage_that_leaves_is_replaced(
    is_leaving_at_once: bool, checkpoints: dict[str, Path], questions: list[Question]
) -> None:
    """Serve chooses which replica stops: here the only decode worker of four."""
    expected = undisturbed(checkpoints["qwen2_5_vl"], questions)

    async def run() -> None:
        async with clustered(checkpoints["qwen2_5_vl"], "2e1p1d", num_fronts=2) as cluster:
            leader, other = cluster.fronts
            await until(lambda: topology_seen(leader) == topology_seen(other) == "2e1p1d")
            asking = None if is_leaving_at_once else asyncio.create_task(other.ask_all(questions))
            server = cluster.worker("d0")
            assert await server.drain(NEVER_S)
            await server.close()
            await until(lambda: topology_seen(leader) == topology_seen(other) == "1e1p1d")
            if asking is not None:
                assert [each.tokens for each in await asking] == expected
            assert [each.tokens for each in await leader.ask_all(questions)] == expected
            assert len(leader.service.switcher.last) == 1
            await settled(cluster)

    asyncio.run(run())


def test_a_lost_worker_is_waited_for(checkpoints: dict[str, Path]) -> None:
    """Another one is started in its place: nobody gives up a role for it."""

    async def run() -> None:
        async with clustered(checkpoints["qwen2_5_vl"], "2e1p2d") as cluster:
            (front,) = cluster.fronts
            await until(lambda: topology_seen(front) == "2e1p2d")
            gone = cluster.worker("d1")
            assert await gone.drain(NEVER_S)
            await gone.close()
            await cluster.kill(cluster.worker("d0"))
            await until(lambda: topology_seen(front) == "2e1p")
            await asyncio.sleep(2.5)
            assert topology_seen(front) == "2e1p"

    asyncio.run(run())


def test_an_age_counts_from_when_it_was_first_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given once for each time, so that a request that waits makes no view after the other."""
    now_s = [1000.0]
    monkeypatch.setattr(composition, "steady_time_s", lambda: now_s[0])
    here, there = composition._Ages(), composition._Ages()
    age_s = here.given(990.0)
    assert age_s == 10.0
    now_s[0] = 5000.0  # of another machine
    assert there.heard("here", age_s) == 4990.0
    now_s[0] = 5007.0
    assert there.heard("here", age_s) == 4990.0
    assert here.given(990.0) == 10.0
    assert here.given(None) is None
