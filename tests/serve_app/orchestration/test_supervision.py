"""Bugs in the orchestrator itself: each ends the request that met it, with a typed error, and no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd.errors import InternalError
from epd.sampling_params import SamplingParams
from epd.serve_app import task_group
from epd.serve_app.orchestration.encode_dispatcher import Encoders
from epd.serve_app.orchestration.event_reader import EventReader
from epd.serve_app.orchestration.live_answer import LiveAnswer
from epd.serve_app.task_group import Loops
from tests.serve_app.deployments import Question, deployed, undisturbed, until_decoding

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def raise_bug(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


@pytest.fixture
def quick_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_group, "_FIRST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("quick_loops")
def test_a_loop_that_fails_is_started_again_and_gone_after_many_failures() -> None:
    async def run() -> None:
        counters: Counter[str] = Counter()
        told: list[str] = []
        loops = Loops(counters, told.append)
        runs = iter([True, True, False])

        async def work() -> None:
            if next(runs):
                raise_bug()

        async def broken() -> None:
            raise_bug()

        loops.start("work", work)
        loops.start("elastic", broken, is_vital=False)
        while counters["loop_failures"] < 10:
            await asyncio.sleep(0)
        assert loops.gone == []
        loops.start("events", broken)
        while not told:
            await asyncio.sleep(0)
        assert loops.gone == told == ["events"]
        await loops.close()

    asyncio.run(run())


@pytest.mark.usefixtures("quick_loops")
def test_a_service_without_its_reader_of_events_is_not_ready(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1epd") as deployment:
            while (await deployment.service.status()).is_ready:
                await asyncio.sleep(0.01)
            assert (await deployment.service.status()).counters["loop_failures"] == 8

    monkeypatch.setattr(EventReader, "follow", raise_bug)
    asyncio.run(run())


def only_for(text: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an answer that has a bug for one request."""

    def tampered(answer: LiveAnswer, *arguments: Any) -> Any:
        if any(part.text == text for message in answer.request.messages for part in message.parts):
            raise_bug()
        return method(answer, *arguments)

    return tampered


@pytest.mark.parametrize("name", ["take", "note"])
def test_a_report_that_cannot_be_taken_costs_its_request_alone(
    name: str, checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [Question((media["image"],), f"what {number}?", LONG) for number in range(4)]
    expected = undisturbed(checkpoints["qwen2_5_vl"], questions)

    async def run() -> None:
        monkeypatch.setattr(LiveAnswer, name, only_for("bug", getattr(LiveAnswer, name)))
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            asking = asyncio.create_task(deployment.ask_all(questions))
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await deployment.ask(Question((media["image"],), "bug", LONG))
            assert [answer.tokens for answer in await asking] == expected
            await deployment.settle()
            status = await deployment.service.status()
            assert status.is_ready
            assert status.counters["event_failures"] > 0

    asyncio.run(run())


def test_a_bug_in_the_feed_ends_the_request(
    checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        monkeypatch.setattr(Encoders, "next", raise_bug)
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await deployment.ask(Question((media["image"],)))
            await deployment.settle()

    asyncio.run(run())


def test_a_bug_in_recovery_ends_the_request(
    checkpoints: dict[str, Path], media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        monkeypatch.setattr("epd.serve_app.orchestration.event_reader._reply", raise_bug)
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            deployment.held.is_on = True
            asking = asyncio.create_task(deployment.ask(Question((media["image"],), sampling=LONG)))
            await until_decoding(deployment, "d0", 1)
            deployment.fleet.kill("d0")
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await asking
            await deployment.settle()

    asyncio.run(run())
