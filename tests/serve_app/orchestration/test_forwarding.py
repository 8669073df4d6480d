"""Forwarding on demand: a busy worker refuses at once, the next best is asked, nobody queues at a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from epd.errors import OverloadedError
from epd.kv.prefix_cache import token_identity
from epd.sampling_params import SamplingParams
from epd.serve_app.fleet import FleetEvent
from epd.serve_app.messages import Abort, Message, Prefill, Reserve
from epd.serve_app.orchestration.isolation import Isolation
from epd.serve_app.orchestration.placement import RequestPlacer
from epd.serve_app.orchestration.requests import Attempt
from epd.serve_app.worker_info import WorkerInfo
from epd.topology import Stage
from epd.transfer.connectors import KVTicket
from epd.types import StageTimings
from tests.serve_app.conftest import ADMIN, QUESTION, Front
from tests.serve_app.deployments import NEVER_S
from tests.serve_app.orchestration.parts import shared_parts

ROLES: Mapping[str, Stage] = {"p": "prefill", "d": "decode"}


@dataclass
class ScriptedFleet:
    """Workers with room for so many requests; what they are asked is kept. They report nothing at all.

    gates: workers that answer once these are set
    """

    room: dict[str, int]
    asked: list[tuple[str, type]] = field(default_factory=list)
    held: dict[str, set[str]] = field(default_factory=dict)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        return {name: WorkerInfo(name, frozenset({ROLES[name[0]]})) for name in self.room}

    async def send(self, _stage: Stage, target: str, message: Message[Any], _bulk: Any = None) -> Any:
        self.asked.append((target, type(message)))
        await asyncio.sleep(0)
        if target in self.gates:
            await self.gates[target].wait()
        held = self.held.setdefault(target, set())
        if isinstance(message, Abort):
            held.difference_update(message.request_ids)
            return None
        assert isinstance(message, Reserve | Prefill)
        if len(held) >= self.room[target]:
            return None if isinstance(message, Reserve) else False
        request_id = message.request_id if isinstance(message, Reserve) else message.request.request_id
        held.add(request_id)
        return KVTicket("t", target, "p", request_id, 0, 1, ((0,),)) if isinstance(message, Reserve) else True

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def fetch(self, _stage: Stage, _target: str, _message: Message[None]) -> Any: ...

    async def events(self) -> AsyncIterator[FleetEvent]:
        for event in ():
            yield event


async def done() -> None:
    """Returns when all has been done that waits for no time: nothing here is asked of another thread."""
    for _ in range(200):
        await asyncio.sleep(0)


class Prompt(tuple[int, ...]):
    """Tokens of a prompt, all of which are kept."""

    num_dropped = 0
    reduction = None


class Bench:
    """A placement over a scripted fleet."""

    def __init__(self, room: dict[str, int], fleet: ScriptedFleet | None = None) -> None:
        self.fleet = fleet or ScriptedFleet(room)
        self._clock = asyncio.get_running_loop().time
        self.shared = shared_parts(self.fleet, clock=self._clock, max_prefills=16, unavailable_s=NEVER_S)
        self.router, self.queue = self.shared.router, self.shared.queue
        self.attempts = self.shared.requests.attempts
        self.placement = RequestPlacer(self.shared, Isolation(self.shared))

    def attempt(self, name: str, priority: int = 0) -> Attempt:
        params, identity = SamplingParams(max_tokens=4), token_identity([1, 2, 3])
        plan = SimpleNamespace(
            visual_tokens=(),
            prompt=Prompt(range(3)),
            identity=identity,
            sampling=params,
            groups=(),
            generate_request=lambda request_id: SimpleNamespace(request_id=request_id),
        )
        request = SimpleNamespace(request_id=name, priority=priority, client="", weight=1)
        answer: Any = SimpleNamespace(
            request=request, plan=plan, queued=StageTimings(), num_retries=0, num_losses=0
        )
        attempt = Attempt(0, answer, self.router)
        self.attempts[attempt.id] = attempt
        return attempt

    async def place(
        self, name: str, *, seconds: float = NEVER_S, priority: int = 0, isolated_at: Stage | None = None
    ) -> Attempt:
        attempt = self.attempt(name, priority)
        attempt.isolated_at = frozenset({isolated_at} if isolated_at else ())
        await self.placement.place(attempt, self._clock() + seconds, is_new=True)
        return attempt


def test_a_busy_worker_refuses_and_the_next_best_takes_it() -> None:
    async def run() -> None:
        bench = Bench({"p0": 0, "p1": 1, "d0": 0, "d1": 1})
        attempt = await bench.place("r")
        assert (attempt.prefill_worker, attempt.decode_worker) == ("p1", "d1")
        assert bench.fleet.held == {"d0": set(), "d1": {attempt.id}, "p0": set(), "p1": {attempt.id}}
        asked = [name for name, kind in bench.fleet.asked if kind is Prefill]
        assert asked == ["p0", "p1"]
        assert len(bench.queue) == 0

    asyncio.run(run())


def test_a_suspect_is_not_joined_by_those_that_had_chosen_its_worker_before() -> None:
    """Another request has chosen a prefill worker, and waits for room at its decode worker."""

    async def run() -> None:
        bench = Bench({"p0": 9, "d0": 9, "d1": 9})
        gate = bench.fleet.gates["d0"] = asyncio.Event()
        placing = asyncio.create_task(bench.place("other"))
        while not bench.fleet.asked:
            await asyncio.sleep(0)
        assert bench.fleet.asked == [("d0", Reserve)]
        suspect = await bench.place("suspect", isolated_at="prefill")
        gate.set()
        await done()
        assert bench.fleet.held == {"p0": {suspect.id}, "d0": set(), "d1": {suspect.id}}
        suspect.num_tokens = 1  # it got further: others may come
        bench.shared.wake()
        other = await placing
        assert bench.fleet.held["p0"] == {suspect.id, other.id}

    asyncio.run(run())


def test_room_at_a_decode_worker_is_given_back_when_prefill_refuses() -> None:
    """Nothing is kept anywhere for a request that waits: it waits in the one queue there is."""

    async def run() -> None:
        bench = Bench({"p0": 0, "p1": 0, "d0": 1})
        placing = asyncio.create_task(bench.place("r"))
        await done()
        assert bench.fleet.asked[-1] == ("d0", Abort)
        assert not any(bench.fleet.held.values())
        assert len(bench.queue) == 1
        assert bench.router.in_flight("d0").num_decodes == bench.router.in_flight("p0").num_prefills == 0
        placing.cancel()
        with pytest.raises(OverloadedError, match="no worker had room before the deadline"):
            await bench.place("s", seconds=0.1)
        assert not any(bench.fleet.held.values())

    asyncio.run(run())


def test_choices_are_made_on_what_was_sent_not_on_what_was_reported() -> None:
    """No report ever comes: the in-flight counts alone spread requests, and fall at once."""

    async def run() -> None:
        bench = Bench({"p0": 9, "p1": 9, "d0": 9, "d1": 9})
        attempts = [await bench.place(f"r{number}") for number in range(4)]
        assert sorted(each.prefill_worker for each in attempts) == ["p0", "p0", "p1", "p1"]
        assert sorted(each.decode_worker for each in attempts) == ["d0", "d0", "d1", "d1"]
        for each in attempts:
            if each.prefill_worker == "p0":
                each.placement.release()
        assert (await bench.place("r4")).prefill_worker == "p0"

    asyncio.run(run())


def test_what_waits_is_placed_as_soon_as_there_is_room_by_priority() -> None:
    async def run() -> None:
        bench = Bench({"p0": 0, "d0": 9})
        order: list[str] = []

        async def place(name: str, priority: int) -> None:
            await bench.place(name, priority=priority)
            order.append(name)

        waiting = [asyncio.create_task(place("batch", 1)), asyncio.create_task(place("urgent", -1))]
        await done()
        assert order == []
        bench.fleet.room["p0"] = 9
        bench.shared.wake()
        await asyncio.wait(waiting)
        assert order == ["urgent", "batch"]

    asyncio.run(run())


@pytest.mark.parametrize(("body", "priority"), [({}, 0), ({"priority": 3}, 3), ({"priority": -2}, -2)])
def test_priority_comes_from_the_request(front: Front, body: dict[str, int], priority: int) -> None:
    question = {**QUESTION, **body}
    assert front.http.post("/v1/chat/completions", json=question, headers=ADMIN).status_code == 200
    assert front.service.requests[-1].priority == priority
