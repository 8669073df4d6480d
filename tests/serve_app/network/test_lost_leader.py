"""The front that switches roles is lost near the end of a switch: what others hold comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epd.sampling_params import SamplingParams
from epd.serve_app.messages import Message
from epd.serve_app.network.connector import Envelope
from epd.serve_app.network.worker_server import WorkerServer
from epd.serve_app.role_messages import Onload, SetRoles, StagesClosed
from epd.topology import Stage
from epd.transfer.connectors import Offer
from tests.serve_app.deployments import Question, undisturbed
from tests.serve_app.network.cluster import Front, clustered
from tests.serve_app.network.test_cluster import settled, until, until_all_see

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LONG = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen2_5_vl"]


@pytest.fixture(scope="module")
def questions(media: dict[str, Path]) -> list[Question]:
    kinds: tuple[tuple[str, ...], ...] = (("image",), ())
    return [
        Question(tuple(media[name] for name in kinds[number % len(kinds)]), f"what {number}?", LONG)
        for number in range(6)
    ]


@pytest.fixture(scope="module")
def expected(model: Path, questions: list[Question]) -> list[tuple[int, ...]]:
    return undisturbed(model, questions)


@pytest.mark.parametrize("at", [Onload, SetRoles, StagesClosed])
def test_a_leader_that_is_lost_while_it_switches_leaves_nothing_behind(
    at: type[Message[Any]], model: Path, questions: list[Question], expected: list[tuple[int, ...]]
) -> None:
    """Keys and values on their way to the worker arrive when it may have closed the stage they are for."""

    async def run() -> None:
        async with clustered(model, "1e1p2d", num_fronts=2) as cluster:
            leader, other = cluster.fronts
            await until_all_see(cluster, "1e1p2d")
            switched = cluster.worker("d1")
            offers, deliver = hold_deliveries(switched)
            asking = [asyncio.create_task(front.ask_all(questions)) for front in cluster.fronts]
            await until(lambda: any(each.decode_worker == "d1" for each in leader.service.attempts.values()))
            await until(lambda: bool(offers()))
            is_reached = kill_after(leader, at)
            switching = asyncio.create_task(leader.service.switch_roles("d1", frozenset({"prefill"})))
            await is_reached.wait()
            asking[0].cancel()
            switching.cancel()
            await until(lambda: other.service.switcher.leads and not switched.info.leaving)
            keeps = at is Onload
            await until(lambda: ("decode" in cluster.core(switched).hosted) is keeps)
            deliver()
            assert switched.info.roles == frozenset({"decode" if keeps else "prefill"})
            assert [answer.tokens for answer in await asking[1]] == expected
            await settled(cluster)

    asyncio.run(run())


def hold_deliveries(server: WorkerServer) -> tuple[Callable[[], list[Envelope]], Callable[[], None]]:
    """Holds back what others send to a worker.

    Returns a function that gives the offers so far, and one that delivers all of it, and what comes later.
    """
    transport, held = server._transport, list[Envelope]()
    assert transport is not None
    deliver = transport.deliver
    transport.deliver = held.append  # type: ignore[method-assign, assignment]

    def offers() -> list[Envelope]:
        return [each for each in held if isinstance(each.message, Offer)]

    def go_on() -> None:
        assert offers()
        transport.deliver = deliver  # type: ignore[method-assign]
        for each in held:
            deliver(each)
        assert server._thread is not None
        server._thread.wake()

    return offers, go_on


def kill_after(front: Front, at: type[Message[Any]]) -> asyncio.Event:
    """Kills a front when a message of that type has been handled. Returns an event that is set then."""
    send, is_reached = front.fleet.send, asyncio.Event()

    async def send_or_die(stage: Stage, target: str, message: Message[Any], bulk: Any = None) -> Any:
        if is_reached.is_set():
            await asyncio.Event().wait()
        reply = await send(stage, target, message, bulk)
        if isinstance(message, at):
            is_reached.set()
            await front.kill()
        return reply

    front.fleet.send = send_or_die  # type: ignore[method-assign]
    return is_reached
