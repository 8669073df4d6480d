"""Does to a simulated application what a plan says, at times or at messages."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from epd.errors import EPDError, InternalError
from epd.serve_app.messages import owner_of
from epd.serve_app.network.media_server import MediaServer
from epd.serve_app.worker.peer_losses import named_peer
from epd.topology import Stage
from tests.faults.plan import Fault, FaultPlan
from tests.faults.world import Part, World, id_of

_SILENT_S = 3.0  # a machine that is lost for longer says nothing more
_MUTE_S = {"workers": 1.0, "fronts": 1.0, "prefill": 5.0}  # after its end: an answer takes a while to move
_WITH_BOARD = 0.4  # of the boards that end: a worker of their machine ends too
_AFTER = {"PeerLost": "after a loss", "Offload": "after a switch"}  # messages that strikes may wait for first
_SWITCHED: tuple[frozenset[Stage], ...] = (
    frozenset({"encode"}),
    frozenset({"prefill"}),
    frozenset({"decode"}),
    frozenset({"encode", "prefill"}),
    frozenset({"prefill", "decode"}),
)
_MERGED: tuple[frozenset[Stage], ...] = (
    *_SWITCHED,
    frozenset({"encode", "decode"}),
    frozenset({"encode", "prefill", "decode"}),
)
_ASKED = re.compile(r"/ask(\d+)[#/]")


class Harm:
    """Does the faults of a plan to a world. clients: tasks that ask, by index. counts: of what was done."""

    def __init__(
        self,
        plan: FaultPlan,
        world: World,
        clients: Mapping[int, asyncio.Task[None]],
        counts: Counter[str],
    ) -> None:
        self.switches: list[asyncio.Task[Any]] = []
        self._plan, self._world, self._clients, self._counts = plan, world, clients, counts
        self._turns: Counter[str] = Counter()  # by kind of message

    def is_deadly(self, message: object) -> bool:
        """Returns whether a message is of a poisoned request, and of the kind that ends workers."""
        poisoned = self._plan.poisoned
        return poisoned.get(index_of(message)) == type(message).__name__

    def begin(self) -> Sequence[asyncio.Task[None]]:
        """Begins with what comes at a time."""
        return [asyncio.create_task(self._harm(each)) for each in self._plan.faults if each.kind != "strike"]

    async def _harm(self, fault: Fault) -> None:
        world = self._world
        await asyncio.sleep(fault.at_s)
        world.trace.note("fault", fault)
        workers = [*world.workers(), *world.workers(MediaServer)]
        self._counts[fault.kind] += 1
        if fault.kind == "leave":
            self._clients[fault.question].cancel()
        elif fault.kind == "clock":
            world.clock.jump(f"m{int(fault.target * 3)}", fault.other)
        elif fault.kind == "board":
            world.kill_board()
            if fault.other < _WITH_BOARD and workers:
                world.kill(_chosen(workers, fault.target), "its machine is lost with the board")
        elif fault.kind == "front":
            self._kill_front(_chosen(world.fronts, fault.target) if world.fronts else None)
        elif fault.kind in ("kill", "machine", "freeze", "cut", "drain", "copy") and workers:
            await self._harm_worker(fault, workers)
        elif fault.kind == "switch" and world.workers() and world.fronts:
            self._switch(fault)

    def _kill_front(self, part: Part | None) -> None:
        """Ends a front, unless it is the last one."""
        if part is not None and len(self._world.fronts) > 1:
            self._world.kill(part, "killed")

    async def _harm_worker(self, fault: Fault, workers: Sequence[Part]) -> None:
        world, part = self._world, _chosen(workers, fault.target)
        if fault.kind == "kill":
            world.kill(part, "killed")
        elif fault.kind == "machine":
            others = [each for each in workers if each is not part]
            for each in [part, *([_chosen(others, fault.other)] if others else [])]:
                world.kill(each, "its machine is lost", with_machine=fault.lasts_s > _SILENT_S)
        elif fault.kind == "freeze":
            part = _chosen([*workers, *world.fronts], fault.target)
            part.process.freeze()
            world.harmed.add(part.process.name)
            world.loop.call_later(fault.lasts_s, part.process.thaw)
        elif fault.kind == "cut":
            names = [each.process.name for each in world.parts if each is not part] + ["board"]
            other = names[int(fault.other * len(names))]
            way = (part.process.name, other) if fault.other * 1000 % 2 < 1 else (other, part.process.name)
            world.network.cut_until_s[way] = world.loop.time() + fault.lasts_s
            world.harmed.update(way)
        elif fault.kind == "copy":
            world.unreadable_until_s[part.process] = world.loop.time() + fault.lasts_s
        else:
            await self._drain(part)

    async def _drain(self, part: Part) -> None:
        """Scales down by one worker; another comes when it has left."""
        draining = part.process.spawn(part.server.drain(20.0))
        died = asyncio.create_task(part.died.wait())
        await asyncio.wait([draining, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        self._world.kill(part, "drained")

    def _switch(self, fault: Fault) -> None:
        world = self._world
        part, worker = _chosen(world.fronts, fault.other), _chosen(world.workers(), fault.target)
        sets = _MERGED if self._plan.aim == "merged roles" else _SWITCHED
        roles = sets[int(fault.other * 1000) % len(sets)]
        front = part.front
        assert front is not None

        async def switch() -> None:
            try:
                await front.switch_roles(worker.name, roles)
                self._counts["switched"] += 1
            except InternalError:
                raise
            except EPDError as error:
                world.trace.note("no switch", error)

        self.switches.append(part.process.spawn(switch()))

    # Strikes

    def turned(self, part: Part, message: object) -> None:
        """Strikes if a strike waits for what a worker has handled, or reports."""
        kind = type(message).__name__
        kinds = [kind, *(f"{kind} {after}" for first, after in _AFTER.items() if self._turns[first])]
        self._turns.update(kinds)
        for fault in self._plan.faults:
            if fault.struck_at in kinds and fault.question == self._turns[fault.struck_at]:
                self._counts["strike"] += 1
                self._strike(fault, part, message)

    def _strike(self, fault: Fault, part: Part, message: object) -> None:
        world, index = self._world, index_of(message)
        if fault.struck == "nobody":
            self._mute(part, fault)
        elif fault.struck == "client" and index in self._clients:
            world.later(fault.lasts_s, self._clients[index].cancel)
        elif fault.struck == "board":
            world.later(fault.lasts_s, world.kill_board)
        elif fault.struck == "front":
            owner = owner_of(id_of(message))
            mine = [each for each in world.fronts if each.server.owner == owner]
            chosen = mine or [
                each for each in world.fronts if each.front is not None and each.front.switcher.leads
            ]
            world.later(fault.lasts_s, self._kill_front, chosen[0] if chosen else None)
        elif fault.struck in ("itself", "named", "another"):
            named = named_peer(message)  # type: ignore[arg-type]
            others = [each for each in world.workers() if each is not part]
            if fault.struck == "named":
                others = [each for each in others if named is not None and each.name == named.name]
            struck = _chosen(others, fault.target) if fault.struck != "itself" and others else part
            self._mute(struck, fault)
            world.later(fault.lasts_s, world.kill, struck, "struck")

    def _mute(self, part: Part, fault: Fault) -> None:
        """Holds back what a worker sends to other workers, receipts above all, or reports to fronts."""
        workers = self._world.workers()
        prefill = [each for each in workers if "prefill" in each.server.membership.info.roles]
        muted = {"workers": workers, "prefill": prefill, "fronts": self._world.fronts}
        to = muted.get(fault.muted, [])
        end_s = self._world.loop.time() + fault.lasts_s + _MUTE_S.get(fault.muted, 0.0)
        ways = [(part.process.name, each.process.name) for each in to if each is not part]
        self._world.network.cut_until_s.update(dict.fromkeys(ways, end_s))
        self._world.harmed.update(name for way in ways for name in way)


def index_of(message: object) -> int:
    """Returns the index of the question that a message is about; -1 if it is about none."""
    return index_of_id(id_of(message))


def index_of_id(attempt_id: str) -> int:
    found = _ASKED.search(attempt_id)
    return int(found[1]) if found else -1


def _chosen(parts: Sequence[Part], drawn: float) -> Part:
    return parts[int(drawn * len(parts))]
