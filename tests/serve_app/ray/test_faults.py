"""Worker processes killed and stopped while streams run: all complete, with the tokens they would have had.

Each harm meets all of the streams in flight. `make soak` has 200 of them, and harms a worker of every role in
both ways.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from epd.kv.pass_limits import PassLimits
from epd.sampling_params import SamplingParams
from epd.serve_app.network.memory import orphans
from tests.serve_app.deployments import Answered, Question, clear_questions, until_decoding
from tests.serve_app.ray.ray_session import IGNORED, RayDeployment, RaySession, ray_deployed, ray_front

pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]

IS_SOAK = "EPD_SOAK" in os.environ
NUM_STREAMS, NUM_TOKENS = (200, 500) if IS_SOAK else (24, 100)
Harm = tuple[str, signal.Signals]
# In each wave all questions are asked, and these workers harmed.
WAVES: list[list[Harm]] = [
    [("e0", signal.SIGKILL), ("d0", signal.SIGKILL), ("p0", signal.SIGSTOP)],
]
if IS_SOAK:
    WAVES = [[(name, how) for name in ("v0", "e0", "p0", "d0")] for how in (signal.SIGKILL, signal.SIGSTOP)]
# There is room for all streams at one worker: they wait for nothing but their tokens.
ROOM: dict[str, Any] = {"num_kv_tokens": 1 << 18, "max_num_seqs": 256} if IS_SOAK else {}
KINDS = (("image",), ("video",), (), ("image", "tall_video"))
SEED = 2


@pytest.fixture(scope="module")
def asked(checkpoints: dict[str, Path], media: dict[str, Path]) -> tuple[list[Question], list[Answered]]:
    """Greedy and drawn; and what is right."""
    questions = [
        Question(
            tuple(media[name] for name in KINDS[number % len(KINDS)]),
            f"what {number}?",
            SamplingParams(
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                temperature=number % 3 / 2,
                top_k=5,
                seed=SEED + number,
            ),
        )
        for number in range(NUM_STREAMS * 4 // 3)
    ]
    settings: dict[str, Any] = {}
    if ROOM:
        scheduler = PassLimits(max_num_seqs=ROOM["max_num_seqs"], max_chunk_tokens=64)
        settings = {"num_kv_tokens": ROOM["num_kv_tokens"], "scheduler": scheduler}
    return clear_questions(checkpoints["qwen2_5_vl"], questions, NUM_STREAMS, **settings)


@pytest.fixture(scope="module")
def questions(asked: tuple[list[Question], list[Answered]]) -> list[Question]:
    return asked[0]


@pytest.fixture(scope="module")
def expected(asked: tuple[list[Question], list[Answered]]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in asked[1]]


def test_processes_that_are_killed_and_stopped_change_no_token(
    request: pytest.FixtureRequest,
    ray_session: RaySession,
    checkpoints: dict[str, Path],
    questions: list[Question],
    expected: list[tuple[int, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = orphans()

    def say(row: str) -> None:
        with capsys.disabled():
            print(f"\n{row}", end="")

    async def run() -> None:
        path = checkpoints["qwen2_5_vl"]
        if IS_SOAK:
            front = ray_deployed(path, os.environ["EPD_SOAK"], num_video_workers=2, **ROOM)
        else:
            front = ray_front(path)
        async with front as deployment:
            for wave in WAVES:
                with ray_session.holding():
                    answers = await asked_while_harmed(
                        deployment, questions, wave, say, ray_session.held_file
                    )
                assert [answer.tokens for answer in answers] == expected
                assert sum(answer.end.num_retries for answer in answers if answer.end) > 0
            counters = (await deployment.service.status()).counters
            assert counters["workers_lost"] == sum(map(len, WAVES))
            assert deployment.service.num_attempts == deployment.service.num_tickets == 0

    if not IS_SOAK:
        request.getfixturevalue("shared_app")
    asyncio.run(run())
    assert set(orphans()) <= set(before)


async def asked_while_harmed(
    deployment: RayDeployment,
    questions: Sequence[Question],
    wave: Sequence[Harm],
    say: Callable[[str], None],
    held_file: Path,
) -> list[Answered]:
    """Harms workers one after the other while all questions are in flight: none has ended at any harm.

    Encoders and prefill workers are harmed while prompts are computed; decode workers once they have some
    answers in the middle, so that their loss costs something. Those may be answers without media: where the
    sole encoder is lost, no other begins before it is back.
    held_file: removed when all harm is done
    """
    service, workers = deployment.service, deployment.ray_fleet.workers
    while not all(name in workers and workers[name].is_alive for name, _ in wave):  # media join last
        await asyncio.sleep(0.05)
    before = {name: workers[name].incarnation for name, _ in wave}
    answers = [Answered() for _ in questions]
    start_s = time.monotonic()
    asking = asyncio.create_task(deployment.ask_at_once(questions, answers))
    while len(service.attempts) < len(questions):
        assert not any(answer.end for answer in answers), "one has ended before all were in flight"
        await asyncio.sleep(0.005)
    num_begun = []
    for name, how in wave:
        if name == "d0":
            await until_decoding(deployment, name, len(questions) // 12)
        else:
            await asyncio.sleep(0.2)
        ended = [number for number, answer in enumerate(answers) if answer.end]
        assert (len(service.attempts), ended) == (len(questions), []), f"before the harm to {name}"
        num_begun.append(sum(bool(answer.token_ids) for answer in answers))
        os.kill(deployment.member(name).pid, how)
    held_file.unlink()
    await asking
    seconds = time.monotonic() - start_s
    for name, incarnation in before.items():
        while not workers[name].is_alive or workers[name].incarnation == incarnation:
            await asyncio.sleep(0.05)
    harms = ", ".join(
        f"{name} {how.name} with {num} begun" for (name, how), num in zip(wave, num_begun, strict=True)
    )
    num_retries = sum(answer.end.num_retries for answer in answers if answer.end)
    say(
        f"{len(questions)} streams in flight at once: {harms}; {num_retries} retries, all ended after "
        f"{seconds:.0f} s, workers back after {time.monotonic() - start_s:.0f} s"
    )
    return answers


@pytest.mark.skipif(not IS_SOAK, reason="takes minutes of both cores: make soak")
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_machines_that_are_lost_change_no_token(
    num_nodes: int, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several Ray nodes, all but the head killed in turn while streams run; see `lost_nodes.py`."""
    program = [sys.executable, "-m", "tests.serve_app.ray.lost_nodes"]
    done = subprocess.run(
        [*program, checkpoints["qwen2_5_vl"], tmp_path, str(num_nodes)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{num_nodes} nodes: {result}", end="")
    assert result["is_equal"]
    assert result["num_readers"] == result["num_nodes_of_readers"] == num_nodes
    assert result["num_nodes_of_encoders"] > 1
    assert [kill["num_in_flight"] for kill in result["kills"]] == [200] * (num_nodes - 1)
    assert result["num_lost"] == sum(len(kill["there"]) for kill in result["kills"])
    assert all(kill["there"] for kill in result["kills"])
