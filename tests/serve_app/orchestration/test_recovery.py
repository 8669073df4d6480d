"""Workers lost or frozen while answers are made: every answer ends with the tokens it would have had."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd.control.loss_policy import LossLimits
from epd.errors import UnavailableError
from epd.sampling_params import SamplingParams
from epd.serve_app.local import fleet as local_fleet
from epd.serve_app.messages import EncodeGroup, Prefill
from epd.serve_app.orchestration import worker_calls
from epd.serve_app.orchestration.group_feed import GroupFeed
from epd.serve_app.orchestration.requests import Attempt
from epd.serve_app.worker import worker_thread
from epd.topology import Stage
from epd.transfer.transfers import Grant
from tests.serve_app.deployments import (
    Answered,
    Deployment,
    Question,
    deployed,
    undisturbed,
    until_busy,
    until_decoding,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
KINDS = (("image",), ("video",), (), ("image", "tall_video"))


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    return [
        Question(tuple(media[name] for name in KINDS[number % len(KINDS)]), f"what {number}?", LONG)
        for number in range(12)
    ]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], questions)


async def ask_while(
    deployment: Deployment, questions: list[Question], harm: list[tuple[float, str]]
) -> list[Answered]:
    """All questions at once; harm: seconds after the one before, and the worker that is lost then."""
    asking = asyncio.create_task(deployment.ask_all(questions))
    for seconds, worker in harm:
        await asyncio.sleep(seconds)
        deployment.fleet.kill(worker)
    answers = await asking
    await deployment.settle()
    return answers


def placed(deployment: Deployment) -> list[Attempt]:
    """Returns the attempts that their workers have taken and that go on."""
    attempts = deployment.service.attempts.values()
    return [each for each in attempts if each.is_placed and not each.has_ended]


async def kill_whenever_placed(deployment: Deployment, worker: str) -> None:
    """Kills the worker each time it has taken an attempt: one still on its way would go on elsewhere."""
    for num_lost in itertools.count():
        while not any(worker in each.workers for each in placed(deployment)):
            await asyncio.sleep(0.002)
        deployment.fleet.kill(worker)
        while (await deployment.service.status()).counters.get("workers_lost", 0) == num_lost:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("victim", ["v0", "e0", "p0", "d0", "e1", "p1", "d1"])
@pytest.mark.parametrize("moment", range(2))
def test_a_worker_that_is_lost_changes_no_token(
    victim: str,
    moment: int,
    checkpoints: dict[str, Path],
    questions: list[Question],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time, prompts are submitted while room is reserved for them, however soon it is."""
    if moment:
        monkeypatch.setattr(worker_calls, "_SLOW_S", -1.0)
    seconds = random.Random(f"{victim} {moment}").uniform(0.02, 0.7)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p2d") as deployment:
            answers = await ask_while(deployment, questions, [(seconds, victim)])
            assert [answer.tokens for answer in answers] == expected

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["d0", "p0"])
def test_what_a_worker_granted_before_it_was_asked_to_forget_reaches_no_encoder(
    victim: str,
    checkpoints: dict[str, Path],
    questions: list[Question],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker is lost while the prompt is submitted, which is taken back; groups were granted meanwhile.

    None of these is encoded before that: what has arrived needs no grant in the next attempt.
    """

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            fleet = deployment.fleet
            send, grant, granted = fleet.send, GroupFeed.grant, list[str]()
            is_lost = asyncio.Event()

            def granting(feed: GroupFeed, group: Grant) -> None:
                granted.append(group.request_id)
                grant(feed, group)

            async def losing(stage: Stage, worker: str, message: Any, *frames: Any) -> Any:
                if isinstance(message, EncodeGroup):
                    await is_lost.wait()
                reply = await send(stage, worker, message, *frames)
                if isinstance(message, Prefill) and not is_lost.is_set():
                    while not granted:
                        await asyncio.sleep(0.002)
                    fleet.kill(victim)
                    is_lost.set()
                    while fleet.workers[victim].is_alive:
                        await asyncio.sleep(0.002)
                return reply

            monkeypatch.setattr(GroupFeed, "grant", granting)
            monkeypatch.setattr(fleet, "send", losing)
            answer = await deployment.ask(questions[1])
            assert answer.tokens == expected[1]
            assert len(set(granted)) == 2, "another attempt, whose grants cannot be mistaken"
            assert answer.end is not None
            assert answer.end.num_retries == 1
            await deployment.settle()

    asyncio.run(run())


def test_a_prompt_whose_decode_worker_is_lost_goes_to_another_and_is_not_begun_again(
    checkpoints: dict[str, Path],
    questions: list[Question],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prefill worker still has it: it is redirected, which costs no retry and encodes nothing twice."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            fleet, send = deployment.fleet, deployment.fleet.send
            encoded, former = list[str](), list[str]()

            async def losing(stage: Stage, worker: str, message: Any, *frames: Any) -> Any:
                if isinstance(message, EncodeGroup):
                    encoded.append(message.request_id)
                if isinstance(message, EncodeGroup) and not former:
                    while not placed(deployment):
                        await asyncio.sleep(0.002)
                    (attempt,) = placed(deployment)
                    former.append(attempt.decode_worker)
                    fleet.kill(attempt.decode_worker)
                    while not attempt.has_ended and attempt.decode_worker == former[0]:
                        await asyncio.sleep(0.002)
                return await send(stage, worker, message, *frames)

            monkeypatch.setattr(fleet, "send", losing)
            answer = await deployment.ask(questions[1])
            assert former, "a decode worker was lost"
            assert answer.tokens == expected[1]
            assert answer.end is not None
            assert answer.end.num_retries == 0, "it is redirected"
            assert len(set(encoded)) == 1, "by one attempt"
            await deployment.settle()
            counters = (await deployment.service.status()).counters
            assert (counters["workers_lost"], counters.get("retries", 0)) == (1, 0)
            assert counters["redirects"] == 1

    asyncio.run(run())


def test_an_answer_outlives_the_worker_that_computed_its_prompt(
    checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """The decode worker has all of it: nothing is begun again."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            deployment.held.is_on = True
            asking = asyncio.create_task(deployment.ask(questions[1]))
            await until_decoding(deployment, "d0", 1)
            deployment.fleet.kill("p0")
            while deployment.fleet.workers["p0"].is_alive:
                await asyncio.sleep(0.002)
            deployment.held.is_on = False
            answer = await asking
            assert answer.tokens == expected[1]
            assert answer.end is not None
            assert answer.end.num_retries == 0
            await deployment.settle()
            assert (await deployment.service.status()).counters["workers_lost"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("topology", ["1e1p1d", "1ep1d", "1epd"])
def test_the_only_worker_of_a_role_is_waited_for(
    topology: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    rng = random.Random(topology)

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], topology) as deployment:
            names = [name for name in deployment.fleet.workers if name != "v0"]
            asking = asyncio.create_task(deployment.ask_all(questions))
            for name in names:
                await until_busy(deployment, name)
                await asyncio.sleep(rng.uniform(0, 0.05))
                deployment.fleet.kill(name)
            assert [answer.tokens for answer in await asking] == expected
            await deployment.settle()
            assert (await deployment.service.status()).counters["workers_lost"] == len(names)

    asyncio.run(run())


@pytest.mark.parametrize("victim", ["e0", "p0", "d0"])
def test_a_worker_that_hangs_is_replaced(
    victim: str, checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p2d", fleet={"hang_s": 10.0}) as deployment:
            asking = asyncio.create_task(deployment.ask_all(questions))
            await until_busy(deployment, victim)
            deployment.fleet._threads[victim].is_frozen = True
            answers = await asking
            await deployment.settle()
            assert [answer.tokens for answer in answers] == expected
            assert (await deployment.service.status()).counters["workers_lost"] == 1

    asyncio.run(run())


def test_a_time_in_which_the_process_had_no_core_loses_no_worker(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its machine was stopped: no worker has been silent for longer than who looks at them."""
    gone_s = 0.0
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + gone_s)
    for module in (local_fleet, worker_thread):
        monkeypatch.setattr(module, "time", clock)

    async def run() -> None:
        nonlocal gone_s
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d", fleet={"hang_s": 6.0}) as deployment:
            gone_s = 100.0
            await asyncio.sleep(4.0)  # two looks
            assert (await deployment.service.status()).counters.get("workers_lost", 0) == 0

    asyncio.run(run())


def test_tokens_that_were_sent_do_not_come_again(
    checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """A decode worker is lost in the middle of an answer: the stream goes on from where it was."""

    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            tokens: list[int] = []
            router = deployment.service.router
            async with deployment.requested(questions[1]) as request:
                async for items in deployment.service.answer(request):
                    tokens += [token for item in items for token in getattr(item, "token_ids", ())]
                    if len(tokens) == 10:
                        busy = [name for name in ("d0", "d1") if router.in_flight(name).num_decodes]
                        deployment.fleet.kill(busy[0])
            assert tuple(tokens) == expected[1]
            await deployment.settle()

    asyncio.run(run())


def test_a_request_that_is_lost_again_and_again_ends_with_one_clear_error(
    checkpoints: dict[str, Path], questions: list[Question]
) -> None:
    async def run() -> None:
        losses = LossLimits(max_losses=1000)  # nobody is to blame
        async with deployed(checkpoints["qwen2_5_vl"], "1epd", max_attempts=2, losses=losses) as deployment:
            endless = replace(questions[1], sampling=replace(LONG, max_tokens=4000))
            killing = asyncio.create_task(kill_whenever_placed(deployment, "epd0"))
            with pytest.raises(UnavailableError, match="lost with 2 workers"):
                await deployment.ask(endless)
            killing.cancel()
            await deployment.settle()
            assert (await deployment.service.status()).counters["retries"] == 2

    asyncio.run(run())


def test_a_role_that_nobody_has_is_told(checkpoints: dict[str, Path], questions: list[Question]) -> None:
    async def run() -> None:
        fleet = {"restart_s": 1000.0}
        async with deployed(
            checkpoints["qwen2_5_vl"], "1e1p1d", fleet=fleet, unavailable_s=0.3
        ) as deployment:
            deployment.fleet.kill("d0")
            with pytest.raises(UnavailableError, match="decode"):
                await deployment.ask(questions[0])
            assert not (await deployment.service.status()).is_ready

    asyncio.run(run())
