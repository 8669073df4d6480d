"""Which video worker reads an item: the least busy one, and the same for all its groups unless it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from epd.control.routing import InFlight, Router
from epd.topology import Stage
from serve_app.fleet import WorkerInfo, WorkerLostError
from serve_app.messages import CloseStream, ReadFrames
from serve_app.orchestration.group_feed import _ItemFrames


class FakeFleet:
    """Video workers that note what they are asked, until they are lost."""

    def __init__(self, *names: str) -> None:
        self.workers = {name: WorkerInfo(name, frozenset({"video"})) for name in names}
        self.lost: set[str] = set()
        self.asked: list[str] = []
        self.streams = {name: set[str]() for name in names}

    async def fetch(self, _stage: Stage, target: str, message: ReadFrames) -> tuple[int, int]:
        self.asked.append(target)
        if target in self.lost:
            raise WorkerLostError(f"{target} is gone")
        assert message.order is not None or message.stream_id in self.streams[target]
        self.streams[target].add(message.stream_id)
        return 0, message.index

    async def send(self, _stage: Stage, target: str, message: object) -> None:
        assert isinstance(message, CloseStream)
        self.asked.append(f"close at {target}")


class NoLosses:
    @contextmanager
    def asking(self, *_: object) -> Iterator[None]:
        yield


def items(fleet: FakeFleet, router: Router, num: int) -> list[_ItemFrames]:
    whole = SimpleNamespace(plan=SimpleNamespace(times_s=(0.0, 1.0), size=(56, 56)))
    plan = SimpleNamespace(media=[whole] * num, groups=[])
    request = SimpleNamespace(media=[SimpleNamespace(path="a.mp4", label="a")] * num)
    attempt: Any = SimpleNamespace(id="r#1", answer=SimpleNamespace(plan=plan, request=request))
    anything: Any = fleet
    losses: Any = NoLosses()
    return [_ItemFrames(anything, router, losses, attempt, item) for item in range(num)]


def test_items_are_spread_and_each_stays_with_its_worker() -> None:
    async def run() -> None:
        fleet, router = FakeFleet("v0", "v1"), Router()
        feeds = items(fleet, router, 3)
        for group in (0, 1):
            for feed in feeds:
                await feed.read(group, 1.0)
        assert fleet.asked == ["v0", "v1", "v0"] * 2
        await feeds[1].close()
        [another] = items(fleet, router, 1)
        await another.read(0, 1.0)
        assert fleet.asked[-2:] == ["close at v1", "v1"]
        for feed in (*feeds, another):
            await feed.close()
        assert router.in_flight("v0") == router.in_flight("v1") == InFlight()

    asyncio.run(run())


def test_an_item_whose_worker_is_lost_goes_on_at_another() -> None:
    """Though the lost one has nothing to do, and is not known to be lost yet."""

    async def run() -> None:
        fleet, router = FakeFleet("v0", "v1"), Router()
        router.add("v1", num_videos=5)
        [feed] = items(fleet, router, 1)
        await feed.read(0, 1.0)
        fleet.lost.add("v0")
        await feed.read(1, 1.0)
        await feed.read(2, 1.0)
        assert fleet.asked == ["v0", "v0", "v1", "v1"]
        assert router.in_flight("v0") == InFlight()

    asyncio.run(run())


def test_a_worker_that_is_alone_is_asked_again() -> None:
    async def run() -> None:
        fleet = FakeFleet("v0")
        [feed] = items(fleet, Router(), 1)
        fleet.lost.add("v0")
        asyncio.get_running_loop().call_later(0.01, fleet.lost.clear)
        assert await feed.read(7, 1.0) == (0, 7)
        assert fleet.asked == ["v0", "v0"]

    asyncio.run(run())
