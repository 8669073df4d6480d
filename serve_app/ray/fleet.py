"""Implements a fleet of processes: every worker is a Ray actor, watched, and restarted when it is lost.

The process of the fleet owns the actors: when it ends, so do they.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from epd.errors import EPDError, UnavailableError
from epd.topology import Stage
from serve_app.fleet import Bulk, FleetBroken, FleetEvent, WorkerBack, WorkerInfo, WorkerLost
from serve_app.messages import Message, ReplyT
from serve_app.network.memory import PoolFiles, new_fleet_id
from serve_app.ray.member import RayFleetConfig, RayMember, SentMessage, awaited, noted
from serve_app.ray.worker import Place
from serve_app.task_group import Loops
from serve_app.worker.worker_stages import WorkerSettings

__all__ = ["RayFleet", "RayFleetConfig"]

logger = logging.getLogger(__name__)

_REMOVE_S = 5.0  # for files on other machines to be removed


class RayFleet:
    """Runs workers as actors on all machines of the connected Ray; video workers stay on this machine.

    files: in memory, of the workers on this machine
    """

    def __init__(self, config: RayFleetConfig, settings: WorkerSettings) -> None:
        self._config = config
        self._settings = settings
        self._fleet_id = new_fleet_id()
        self.files = PoolFiles(self._fleet_id)
        self._members: dict[str, RayMember] = {}
        self._outbox: asyncio.Queue[tuple[RayMember, SentMessage]] = asyncio.Queue()
        self._events: asyncio.Queue[FleetEvent | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops = Loops(Counter(), lambda loop: self._events.put_nowait(FleetBroken(loop)))
        self._node_id = ""
        self._is_closed = False

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        return {name: member.info for name, member in self._members.items()}

    def place(self, name: str) -> Place | None:
        """Returns the place of a worker's process, or its last one."""
        return self._members[name].place

    async def start(self) -> None:
        self.files.hold()
        self._node_id = ray.get_runtime_context().get_node_id()
        for name, roles in self._config.workers.items():
            info = WorkerInfo(name, roles, is_alive=False)
            self._members[name] = RayMember(info, self._config, self._fleet_id, self._node_id)
        members = list(self._members.values())
        try:
            await asyncio.gather(*(member.bring_up(self._settings) for member in members))
        except (RayError, TimeoutError, OSError) as error:
            raise UnavailableError(f"a worker does not start: {type(error).__name__}: {error}") from error
        await self._introduce(members)
        for member in members:
            self._loops.start(f"worker {member.name}", partial(self._keep, member))
        self._loops.start("messages", self._send_all)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._loops.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_REMOVE_S):
                await asyncio.gather(*(member.drop_media() for member in self._members.values()))
        for member in self._members.values():
            member.end()
        self.files.remove_all()
        await self._remove_elsewhere()
        self._events.put_nowait(None)

    async def _remove_elsewhere(self) -> None:
        """Removes files of pools on other machines that have run workers."""
        nodes = {each.place.node_id for each in self._members.values() if each.place} - {self._node_id}
        removing = []
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(_remove_files).options(num_cpus=0, scheduling_strategy=there)
            removing.append(asyncio.ensure_future(awaited(task.remote(self._fleet_id))))
        if removing:  # machines that are gone have none left
            await asyncio.wait(removing, timeout=_REMOVE_S)
            for each in removing:
                each.add_done_callback(noted)
                each.cancel()

    # Messages

    async def send(
        self,
        stage: Stage,  # noqa: ARG002 - a worker takes messages for all of its roles in one place
        target: str,
        message: Message[ReplyT],
        bulk: Bulk | None = None,
    ) -> ReplyT:
        member = self._members[target]
        call = member.new_call(message, bulk, is_fetch=False)
        self._outbox.put_nowait((member, call))
        member.info = member.info.told(message)
        return cast(ReplyT, await call.reply)

    async def fetch(
        self,
        stage: Stage,  # noqa: ARG002 - as above
        target: str,
        message: Message[ReplyT],
    ) -> tuple[ReplyT, Bulk]:
        member = self._members[target]
        call = member.new_call(message, None, is_fetch=True)
        self._outbox.put_nowait((member, call))
        reply, bulk = await call.reply
        return cast(ReplyT, reply), bulk

    async def _send_all(self) -> None:
        """Sends from a task of the fleet: Ray would cancel calls begun by a task that is cancelled."""
        while True:
            member, call = await self._outbox.get()
            try:
                member.post(call, self._spawn)
            except Exception as error:  # the process boundary: nothing has been sent
                logger.exception("a message to %s was not sent", member.name)
                call.reply.set_exception(UnavailableError(f"{type(error).__name__}: {error}"))

    async def events(self) -> AsyncIterator[FleetEvent]:
        while True:
            event = await self._events.get()
            if event is None:
                return
            yield event

    # Epochs of workers

    async def _introduce(self, new: list[RayMember]) -> None:
        """Introduces all workers to each other, then marks new ones as alive: no message precedes this."""
        known = [member for member in self._members.values() if member.is_up and not member.is_video]
        peers = {member.name: member.peer() for member in known}
        told = [asyncio.ensure_future(awaited(member.actor.meet.remote(peers))) for member in known]
        for task in told:
            task.add_done_callback(noted)
        if told:  # a worker that hangs or dies meanwhile need not be notified
            await asyncio.wait(told, timeout=self._config.hang_s)
        for member in new:
            member.info = replace(member.info, is_alive=True)

    async def _keep(self, member: RayMember) -> None:
        """Follows a worker through its epochs."""
        while True:
            reason = await member.follow(self._events.put_nowait)
            logger.warning("worker %s is lost: %s", member.name, reason)
            incarnation = member.info.incarnation
            member.lose(reason)
            self.files.remove_of(member.name)
            self._events.put_nowait(WorkerLost(member.name, reason, incarnation))
            await self._bring_back(member)
            self._events.put_nowait(WorkerBack(member.name))

    async def _bring_back(self, member: RayMember) -> None:
        while True:
            try:
                await member.bring_up(self._settings)
                await self._introduce([member])
            except (EPDError, RayError, TimeoutError, OSError) as error:
                logger.warning("worker %s does not start: %s", member.name, error)
                member.restart()
                await asyncio.sleep(self._config.restart_s)
            else:
                return

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _remove_files(fleet_id: str) -> None:
    PoolFiles(fleet_id).remove_all()
