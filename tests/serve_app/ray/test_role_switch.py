"""Worker processes that change roles under load, on Ray: the same tokens, and weights that are mapped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.network.memory import PoolFiles
from tests.serve_app.deployments import Answered, Question, clear_questions, until_decoding
from tests.serve_app.orchestration.test_role_switch import MEDIA, roles
from tests.serve_app.ray.declared_app import DeclaredApp
from tests.serve_app.ray.ray_session import IGNORED, RaySession, ray_front

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]

# A round of all three kinds, with encode in two of them, through three topologies.
ROUND = (("d1", "p", "1e2p1d"), ("p0", "e", "2e1p1d"), ("e0", "d", "1e1p2d"))


@pytest.fixture(scope="module")
def asked(media: dict[str, Path], checkpoints: dict[str, Path]) -> tuple[list[Question], list[Answered]]:
    """Six questions, and their undisturbed answers."""
    questions = [
        Question(
            tuple(media[name] for name in MEDIA[number % 4]),
            f"what {number}?",
            SamplingParams(max_tokens=120, ignore_eos=True, temperature=number % 2 / 2, top_k=5, seed=number),
        )
        for number in range(10)
    ]
    return clear_questions(checkpoints["qwen2_5_vl"], questions, 6)


def test_processes_change_roles_under_load(
    ray_session: RaySession,
    shared_app: DeclaredApp,
    checkpoints: dict[str, Path],
    asked: tuple[list[Question], list[Answered]],
) -> None:
    questions, expected = asked[0], [answer.tokens for answer in asked[1]]

    async def run() -> None:
        async with ray_front(checkpoints["qwen2_5_vl"]) as deployment:
            num_moved = 0
            assert {deployment.member(name).address.host for name in ("e0", "p0", "v0")} == {"127.0.0.1"}
            for worker, letters, topology in ROUND:
                with ray_session.holding():
                    asking = asyncio.create_task(deployment.ask_all(questions))
                    await until_decoding(deployment, "d1" if worker == "d1" else "d0", 1)
                    switch = await deployment.service.switch_roles(worker, roles(letters))
                num_moved += switch.num_moved
                assert [answer.tokens for answer in await asking] == expected
                assert switch.weights_s < switch.onload_s
                status = await deployment.service.status()
                assert status.topology == topology
                assert status.counters.get("retries", 0) == 0
            assert num_moved > 0
            assert [answer.tokens for answer in await deployment.ask_all(questions)] == expected
            assert deployment.service.num_attempts == deployment.service.num_tickets == 0
            files = PoolFiles(deployment.ray_fleet.membership.credentials.fleet_id)
            shared_app.pool_files.append(files)
            assert len(files.paths("weights")) == 1

    asyncio.run(run())
