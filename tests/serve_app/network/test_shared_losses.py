"""Requests that end workers, sent to one front after the other: all fronts know what each has lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from epd.control.loss_policy import LossLimits
from epd.errors import PoisonedRequestError
from epd.sampling_params import SamplingParams
from epd.serve_app.messages import Message, Prefill
from epd.topology import Stage
from tests.serve_app.deployments import Question
from tests.serve_app.network.cluster import Cluster, Front, clustered
from tests.serve_app.network.test_cluster import until, until_all_see

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

# Requests are known by their seeds.
POISON, INNOCENT = 666, 7
# All fronts and workers share one event loop here, which may stand still for seconds.
LIMITS = LossLimits(settle_s=8.0)


def question(seed: int) -> Question:
    return Question((), "what will end you?", SamplingParams(max_tokens=4, ignore_eos=True, seed=seed))


class Killer:
    """Ends workers that get a prompt it does not like; another worker comes in the place of each.

    is_deadly: gets the seed of each prompt
    lost: the workers, with their incarnations
    """

    def __init__(self, cluster: Cluster, is_deadly: Callable[[int], Awaitable[bool]]) -> None:
        self.lost: list[tuple[str, int]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._ended: dict[tuple[str, int], asyncio.Event] = {}
        self._cluster = cluster
        self._is_deadly = is_deadly
        for front in cluster.fronts:
            self._watch(front)

    def _watch(self, front: Front) -> None:
        send = front.fleet.send

        async def watched(stage: Stage, target: str, message: Message[Any], bulk: Any = None) -> Any:
            if isinstance(message, Prefill) and await self._is_deadly(message.request.seed):
                worker = (target, front.fleet.workers[target].incarnation)
                if worker not in self.lost:
                    self.lost.append(worker)
                    self._ended[worker] = asyncio.Event()
                    self.tasks.append(asyncio.create_task(self._kill(target, self._ended[worker])))
                await self._ended[worker].wait()  # or it might be done with the prompt before
            return await send(stage, target, message, bulk)

        front.fleet.send = watched  # type: ignore[method-assign,assignment]

    async def _kill(self, target: str, has_ended: asyncio.Event) -> None:
        await self._cluster.kill(self._cluster.worker(target))
        has_ended.set()
        await self._cluster.add_stage()


def test_a_request_that_ends_workers_at_one_front_is_refused_at_all(checkpoints: dict[str, Path]) -> None:
    """Its client gives up after each loss and goes to the other front: it costs two workers, not four."""

    async def run() -> None:
        async with clustered(checkpoints["qwen2_5_vl"], "1e1p1d", num_fronts=0) as cluster:
            for _ in range(2):
                await cluster.add_front(losses=LIMITS)
            first, second = cluster.fronts
            await until_all_see(cluster, "1e1p1d")

            async def is_deadly(seed: int) -> bool:
                return seed == POISON

            killer = Killer(cluster, is_deadly)
            asking = asyncio.create_task(first.ask(question(POISON)))
            await until(lambda: bool(second.fleet.membership.view.members[first.fleet.owner].losses.losses))
            asking.cancel()
            with pytest.raises(PoisonedRequestError, match="lost 2 times"):
                await second.ask(question(POISON))
            for front in cluster.fronts:
                with pytest.raises(PoisonedRequestError, match="refused"):
                    await front.ask(question(POISON))
            assert len(killer.lost) == 2
            await asyncio.gather(*killer.tasks)
            await until_all_see(cluster, "1e1p1d")
            for front in cluster.fronts:
                assert len((await front.ask(question(INNOCENT))).tokens) == 4

    asyncio.run(run())


def test_fronts_know_that_they_have_lost_the_same_worker(checkpoints: dict[str, Path]) -> None:
    """Each has one request at the only prefill worker, twice: neither is to blame, and both are answered."""

    async def run() -> None:
        async with clustered(checkpoints["qwen2_5_vl"], "1e1p1d", num_fronts=0) as cluster:
            for _ in range(2):
                await cluster.add_front(losses=LIMITS)
            await until_all_see(cluster, "1e1p1d")
            both = asyncio.Barrier(2)

            async def is_deadly(_seed: int) -> bool:
                """Ends the worker once both are there, two times."""
                if len(killer.lost) < 2:
                    await both.wait()
                    return True
                return False

            killer = Killer(cluster, is_deadly)
            asked = zip(cluster.fronts, (POISON, INNOCENT), strict=True)
            answers = await asyncio.gather(*(front.ask(question(seed)) for front, seed in asked))
            assert [len(answer.tokens) for answer in answers] == [4, 4]
            assert len(killer.lost) == 2
            await asyncio.gather(*killer.tasks)

    asyncio.run(run())
