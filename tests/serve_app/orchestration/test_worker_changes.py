"""Workers that come, change and go while requests are answered, some of them for good."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from epd.control.loss_policy import LossLimits
from epd.errors import RequestError, UnavailableError
from epd.sampling_params import SamplingParams
from epd.serve_app.fleet import (
    FleetEvent,
    WorkerBack,
    WorkerChanged,
    WorkerLost,
    WorkerLostError,
    state_after,
)
from epd.serve_app.orchestration.loss_counter import LossCounter
from epd.serve_app.role_messages import Offload, SetRoles
from epd.serve_app.worker_info import EVERY_STAGE, WorkerInfo
from epd.topology import Stage
from tests.serve_app.deployments import Deployment, Question, deployed, undisturbed, until_decoding
from tests.serve_app.orchestration.parts import shared_parts

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


def infos(deployment: Deployment) -> MutableMapping[str, WorkerInfo]:
    return cast(MutableMapping[str, WorkerInfo], deployment.fleet.workers)


def report(deployment: Deployment, event: FleetEvent) -> None:
    deployment.fleet._events.put_nowait(event)


def leave(deployment: Deployment, name: str) -> None:
    """The worker ends for good, whatever it has; nobody starts it again."""
    thread = deployment.fleet._threads.pop(name)
    thread.lose(f"worker '{name}' has left")
    incarnation = infos(deployment).pop(name).incarnation
    report(deployment, WorkerLost(name, "it has left", incarnation, is_planned=True))


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    kinds: tuple[tuple[str, ...], ...] = (("image",), (), ("video",))
    return [
        Question(tuple(media[name] for name in kinds[number % 3]), f"what {number}?", LONG)
        for number in range(6)
    ]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(checkpoints["qwen2_5_vl"], questions)


def test_a_worker_takes_nothing_for_what_it_leaves() -> None:
    roles: frozenset[Stage] = frozenset({"encode", "decode"})
    info = WorkerInfo("ed0", roles)
    offload = Offload(frozenset({"encode"}), frozenset({"decode"}))
    assert [state_after(info, offload).takes(stage) for stage in ("encode", "decode")] == [True, False]
    assert not state_after(info, offload).is_draining
    assert state_after(state_after(info, offload), SetRoles(roles)) == info
    draining = state_after(info, Offload(frozenset(), EVERY_STAGE))
    assert [draining.takes(stage) for stage in ("encode", "decode")] == [False, False]
    assert draining.is_draining
    assert [draining.is_gone, replace(draining, is_alive=False).is_gone] == [False, True]
    assert not replace(info, is_alive=False).is_gone


def test_a_worker_that_leaves_is_not_counted_as_lost_and_nobody_is_blamed(
    checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        limits = LossLimits(max_losses=1)
        async with deployed(checkpoints["qwen2_5_vl"], "2e2p2d", losses=limits, max_attempts=1) as deployment:
            deployment.held.is_on = True
            asking = asyncio.create_task(deployment.ask_all(questions))
            await until_decoding(deployment, "d0", 1)
            for name in ("d0", "p1", "e0"):
                leave(deployment, name)
            deployment.held.is_on = False
            assert [answer.tokens for answer in await asking] == expected
            assert (await deployment.ask(questions[0])).tokens == expected[0]
            status = await deployment.service.status()
            assert status.topology == "1e1p1d"
            assert status.counters.get("workers_lost", 0) == status.counters.get("retries", 0) == 0
            assert [worker.name for worker in status.workers] == ["v0", "e1", "p0", "d1"]
            await deployment.settle()

    asyncio.run(run())


def test_names_that_nobody_knows_break_nothing(
    checkpoints: dict[str, Path], questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p1d") as deployment:
            for event in (WorkerBack("x9"), WorkerChanged("x9"), WorkerLost("x9", "gone", 3)):
                report(deployment, event)
            assert (await deployment.ask(questions[0])).tokens == expected[0]
            status = await deployment.service.status()
            assert status.counters.get("event_failures", 0) == 0
            assert status.counters["workers_lost"] == 1
            with pytest.raises(RequestError, match="allowed: d0, e0, p0"):
                await deployment.service.switch_roles("x9", frozenset({"decode"}))

    asyncio.run(run())


def test_a_worker_that_drains_is_shown_until_it_has_ended(checkpoints: dict[str, Path]) -> None:
    async def run() -> None:
        async with deployed(checkpoints["qwen2_5_vl"], "1e1p2d") as deployment:
            await deployment.fleet.send("decode", "d1", Offload(frozenset(), EVERY_STAGE))
            status = await deployment.service.status()
            assert status.topology == "1e1p2d"
            assert [worker.name for worker in status.workers if worker.is_switching] == ["d1"]
            with pytest.raises(UnavailableError, match="gives up work already"):
                await deployment.service.switch_roles("d1", frozenset({"prefill"}))
            infos(deployment)["d1"] = replace(infos(deployment)["d1"], is_alive=False)
            status = await deployment.service.status()
            assert (status.topology, len(status.workers)) == ("1e1p1d", 4)

    asyncio.run(run())


def test_a_worker_that_has_vanished_is_asked_in_vain() -> None:
    """Its loss was announced already: nobody waits for another announcement."""

    async def run() -> None:
        fleet: Any = SimpleNamespace(workers={})
        shared = shared_parts(fleet, max_attempts=1)
        losses = LossCounter(shared)
        attempt: Any = SimpleNamespace(asking=Counter(), lost_with=set())
        with pytest.raises(WorkerLostError), shared.asking(attempt, "x9"):
            raise WorkerLostError("gone")
        assert attempt.lost_with == set()
        losses.lose("x9", 1)

    asyncio.run(run())
