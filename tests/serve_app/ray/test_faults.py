"""Worker processes killed and stopped while streams run: all complete, with the tokens they would have had.

`make soak` runs many more streams, and harms a worker of every role in both ways.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from epd.sampling_params import SamplingParams
from serve_app.network.memory import orphans
from tests.serve_app.deployments import Answered, Question, undisturbed, until_decoding
from tests.serve_app.ray.ray_session import IGNORED, RayDeployment, RaySession, ray_deployed

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]

IS_SOAK = "EPD_SOAK" in os.environ
NUM_STREAMS, TOPOLOGY = (200, "2e2p2d") if IS_SOAK else (24, "1e1p1d")
TOPOLOGY = os.environ.get("EPD_SOAK") or TOPOLOGY
HARMS = [
    (name, number)
    for number in (signal.SIGKILL, signal.SIGSTOP)
    for name in ("v0", "e0", "p0", "d0")
    if IS_SOAK or (name, number) in {("e0", signal.SIGKILL), ("d0", signal.SIGKILL), ("p0", signal.SIGSTOP)}
]
KINDS = (("image",), ("video",), (), ("image", "tall_video"))
HANG_S = 6.0
SEED = 2


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    """Greedy and drawn, long enough to be met in the middle."""
    return [
        Question(
            tuple(media[name] for name in KINDS[number % len(KINDS)]),
            f"what {number}?",
            SamplingParams(
                max_tokens=150, ignore_eos=True, temperature=number % 3 / 2, top_k=5, seed=SEED + number
            ),
        )
        for number in range(NUM_STREAMS)
    ]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], questions)


def test_processes_that_are_killed_and_stopped_change_no_token(
    ray_session: RaySession,
    checkpoints: dict[str, Path],
    questions: list[Question],
    expected: list[tuple[int, ...]],
) -> None:
    before = orphans()

    async def run() -> list[Answered]:
        async with ray_deployed(checkpoints["qwen2_5_vl"], TOPOLOGY, hang_s=HANG_S) as deployment:
            answers = await asked_while_harmed(deployment, questions)
            counters = (await deployment.service.status()).counters
            assert counters["workers_lost"] == len(HARMS)
            assert deployment.service.num_attempts == deployment.service.num_tickets == 0
            return answers

    answers = asyncio.run(run())
    assert [answer.tokens for answer in answers] == expected
    assert sum(answer.end.num_retries for answer in answers if answer.end) > 0
    assert set(orphans()) <= set(before)


@pytest.mark.skipif(not IS_SOAK, reason="takes a minute of both cores: make soak")
def test_a_machine_that_is_lost_changes_no_token(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Two Ray nodes, one killed with its workers while streams run; see `two_nodes.py`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve_app.ray.two_nodes", checkpoints["qwen2_5_vl"], tmp_path],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["is_equal"]
    assert result["num_lost"] == len(result["there"]) > 0


async def asked_while_harmed(deployment: RayDeployment, questions: list[Question]) -> list[Answered]:
    """Some questions for each harm, which comes while they are answered: at a random moment, or, at a decode
    worker, as soon as its loss has to cost something."""
    rng = random.Random(7)
    answers: list[Answered] = []
    share = len(questions) // len(HARMS)
    for number, (name, how) in enumerate(HARMS):
        first = number * share
        last = len(questions) if (name, how) == HARMS[-1] else first + share
        asking = asyncio.create_task(deployment.ask_all(questions[first:last]))
        if name == "d0":
            await until_decoding(deployment, name, 1)
        else:
            while not deployment.service.num_attempts:  # on a busy machine, workers have none at once
                await asyncio.sleep(0.005)
            await asyncio.sleep(rng.uniform(0.0, 0.4))
        incarnation = deployment.ray_fleet.workers[name].incarnation
        os.kill(deployment.member(name).pid, how)
        answers += await asking
        while not (info := deployment.ray_fleet.workers[name]).is_alive or info.incarnation == incarnation:
            await asyncio.sleep(0.05)
    return answers
