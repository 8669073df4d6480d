"""Who has which ticket: against a fleet that only writes down what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from epd.control.routing import Router
from epd.encode.encoder_cache import CachedGroup, GroupKey, GroupSpec
from epd.encoders.groups import MediaGroup
from epd.encoders.plans import Grid, MediaPlan
from epd.errors import UnavailableError
from epd.serve_app.fleet import WorkerLostError
from epd.serve_app.messages import CancelTickets, EncodeGroup, Reissue
from epd.serve_app.orchestration.encode_dispatcher import EncodeDispatcher
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from epd.transfer.connectors import Ticket
from epd.transfer.transfers import Grant

PLAN = MediaPlan("image", (56, 56), Grid(1, 4, 4), 1, 4)


@dataclass
class FakeFleet:
    """replies: of encoders to groups. said: (worker, message) in order."""

    workers: dict[str, WorkerInfo]
    takes: bool = True
    is_lost: bool = False
    said: list[tuple[str, Any]] = field(default_factory=list)

    async def send(self, _stage: Stage, target: str, message: Any, _bulk: object = None) -> Any:
        self.said.append((target, message))
        if self.is_lost:
            raise WorkerLostError("gone")
        return self.takes if isinstance(message, EncodeGroup) else None

    def kill(self, name: str) -> None:
        self.workers[name] = replace(self.workers[name], is_alive=False)


def new_desk(backlog: int = 100, **limits: float) -> tuple[EncodeDispatcher, FakeFleet, Router]:
    roles: Mapping[str, Stage] = {"e0": "encode", "e1": "encode", "p0": "prefill"}
    fleet = FakeFleet({name: WorkerInfo(name, frozenset({role})) for name, role in roles.items()})
    router = Router()
    return EncodeDispatcher(fleet, router, max_backlog_patches=backlog, **limits), fleet, router  # type: ignore[arg-type]


def group_of(name: str, patches: int = 16) -> MediaGroup:
    key = GroupKey(name, (), (0, 1), (56, 56), "model")
    return MediaGroup(0, 0, 0, PLAN, GroupSpec(key, 4, patches))


def granted_for(name: str, request_id: str = "r") -> Grant:
    return Grant(request_id, 0, Ticket(name, "p0.prefill", group_of(name).spec.key, CachedGroup(4, (0,))))


def message_for(granted: Grant) -> EncodeGroup:
    return EncodeGroup(granted.request_id, granted.ticket, group_of(granted.ticket.key.mm_hash))


async def deal(dispatcher: EncodeDispatcher, worker: str, name: str, request_id: str = "r") -> bool:
    granted = granted_for(name, request_id)
    dispatcher.record(worker, "p0", granted, group_of(name))
    return await dispatcher.give(worker, message_for(granted), None)


def test_what_has_arrived_is_off_the_books_and_remembered() -> None:
    async def run() -> None:
        dispatcher, _, router = new_desk()
        assert await deal(dispatcher, "e1", "a")
        assert router.in_flight("e1").encode_patches == 16
        assert await dispatcher.encoders.next() == "e0"
        dispatcher.arrived(["a", "unknown"])
        assert router.in_flight("e1").encode_patches == len(dispatcher) == 0
        assert dispatcher.encoders.with_group(group_of("a")) == "e1"

    asyncio.run(run())


def test_a_refusal_is_off_the_books() -> None:
    async def run() -> None:
        dispatcher, fleet, router = new_desk()
        fleet.takes = False
        assert not await deal(dispatcher, "e0", "a")
        assert router.in_flight("e0").encode_patches == len(dispatcher) == 0

    asyncio.run(run())


def test_groups_wait_while_every_encoder_has_enough() -> None:
    async def run() -> None:
        dispatcher, _, _ = new_desk(backlog=16)
        await deal(dispatcher, "e0", "a")
        await deal(dispatcher, "e1", "b")
        waiting = asyncio.create_task(dispatcher.encoders.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        dispatcher.arrived(["b"])
        assert await waiting == "e1"

    asyncio.run(run())


def test_groups_of_a_lost_encoder_are_granted_anew() -> None:
    async def run() -> None:
        dispatcher, fleet, router = new_desk()
        await deal(dispatcher, "e0", "a")
        await deal(dispatcher, "e1", "b")
        fleet.kill("e0")
        await dispatcher.lost("e0")
        assert fleet.said[-1] == ("p0", Reissue(("a",)))
        assert router.in_flight("e0").encode_patches == 0
        assert len(dispatcher) == 1
        assert await dispatcher.encoders.next() == "e1"

    asyncio.run(run())


def test_an_encoder_that_is_lost_while_it_is_told_keeps_its_ticket_until_the_loss_is_known() -> None:
    async def run() -> None:
        dispatcher, fleet, _ = new_desk()
        fleet.is_lost = True
        assert await deal(dispatcher, "e0", "a")
        assert len(dispatcher) == 1

    asyncio.run(run())


def test_nothing_is_encoded_for_a_prefill_worker_that_is_gone() -> None:
    async def run() -> None:
        dispatcher, fleet, _ = new_desk()
        fleet.kill("p0")
        assert await deal(dispatcher, "e0", "a")
        assert not fleet.said
        await dispatcher.lost("p0")
        assert len(dispatcher) == 0

    asyncio.run(run())


def test_encoders_are_told_what_a_request_does_not_want_any_more() -> None:
    async def run() -> None:
        dispatcher, fleet, router = new_desk()
        await deal(dispatcher, "e0", "a", "r")
        await deal(dispatcher, "e0", "b", "s")
        await dispatcher.drop_request("r")
        assert fleet.said[-1] == ("e0", CancelTickets(("a",), "r"))
        assert router.in_flight("e0").encode_patches == 16

    asyncio.run(run())


def test_nobody_waits_for_ever_for_an_encoder() -> None:
    async def run() -> None:
        dispatcher, fleet, router = new_desk(unavailable_s=0.1, stall_s=0.2)
        for worker in ("e0", "e1"):
            router.add(worker, encode_patches=1000)
        with pytest.raises(UnavailableError, match="no encoder finished a group"):
            await dispatcher.encoders.next()
        fleet.kill("e0")
        fleet.kill("e1")
        with pytest.raises(UnavailableError, match="no worker for encode"):
            await dispatcher.encoders.next()

    asyncio.run(run())
