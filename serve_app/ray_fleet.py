"""A fleet of processes: every worker is a Ray actor, watched, and started again when it is lost.

    started --ready--> alive --dead, silent, or stuck--> lost --Ray starts the process again--> started

The process of the fleet owns the actors: when it ends, so do they.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from epd.errors import EPDError, UnavailableError
from epd.routing import Stage
from serve_app.fleet import Bulk, FleetEvent, WorkerBack, WorkerInfo, WorkerLost, WorkerLostError
from serve_app.messages import Message, ReplyT, SetRoles
from serve_app.ray_memory import PoolFiles, new_fleet_id, remove_orphans
from serve_app.ray_process import WatchedProcess
from serve_app.ray_worker import Beat, Peer, Place, Reply, StageActor, Start, VideoActor
from serve_app.worker_stages import WorkerSettings

logger = logging.getLogger(__name__)

_MAX_CALLS = 10_000  # of one actor at once, most of which wait
_RETRY_S = 0.05  # between questions whether a process is there
_REMOVE_S = 5.0  # for files on other machines to be removed


@dataclass(frozen=True, slots=True)
class RayFleetConfig:
    """workers: roles of each, by name.

    beat_s: between signs of life of an idle worker. hang_s: a worker without one for so long is lost.
    max_step_s: as is one that has been busy with a single step for so long. start_s: to be ready.
    restart_s: until another try to start a worker. num_video_threads: groups being read at once by each.
    """

    workers: Mapping[str, frozenset[Stage]]
    beat_s: float = 0.5
    hang_s: float = 10.0
    max_step_s: float = 120.0
    start_s: float = 300.0
    restart_s: float = 0.5
    num_video_threads: int = 4


@dataclass(slots=True, eq=False)
class _Member:
    """One worker. life: of its process now. num_sent: messages in this life. calls: without a reply yet.

    place: of the process that is, or was last. process: that, if it is one of this machine.
    lost: set, with the reason, by whoever finds first that this life is over.
    """

    info: WorkerInfo
    actor: Any
    life: str = ""
    num_sent: int = 0
    place: Place | None = None
    process: WatchedProcess | None = None
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    lost: asyncio.Future[str] | None = None

    @property
    def is_video(self) -> bool:
        return "video" in self.info.roles

    def fail(self, reason: str) -> None:
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(reason)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A message on its way out. reply: of the value, with a reference to the bulk where that is `fetched`."""

    member: _Member
    life: str
    message: Message[Any]
    bulk: Bulk | None
    is_fetch: bool
    reply: asyncio.Future[Any]


class RayFleet:
    """Needs a connection to Ray. Workers are spread over its machines; those of video stay on this one."""

    def __init__(self, config: RayFleetConfig, settings: WorkerSettings) -> None:
        self._config = config
        self._settings = settings
        self._fleet_id = new_fleet_id()
        self._files = PoolFiles(self._fleet_id)
        self._members: dict[str, _Member] = {}
        self._outbox: asyncio.Queue[_Call] = asyncio.Queue()
        self._events: asyncio.Queue[FleetEvent | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._node_id = ""
        self._is_closed = False

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        return {name: member.info for name, member in self._members.items()}

    def place(self, name: str) -> Place | None:
        """Where the process of a worker is, or was last."""
        return self._members[name].place

    async def start(self) -> None:
        remove_orphans()
        self._node_id = ray.get_runtime_context().get_node_id()
        for name, roles in self._config.workers.items():
            self._members[name] = _Member(
                WorkerInfo(name, roles, is_alive=False), self._new_actor(name, roles)
            )
        try:
            await asyncio.gather(*(self._bring_up(member) for member in self._members.values()))
            await self._introduce()
        except (RayError, TimeoutError, OSError) as error:
            raise UnavailableError(f"a worker does not start: {type(error).__name__}: {error}") from error
        for member in self._members.values():
            self._spawn(self._keep(member))
        self._spawn(self._send_all())

    def _new_actor(self, name: str, roles: frozenset[Stage]) -> Any:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": _MAX_CALLS,
            "name": f"{self._fleet_id}-{name}",
        }
        if "video" in roles:  # it reads files of this machine
            here = NodeAffinitySchedulingStrategy(self._node_id, soft=False)
            return ray.remote(VideoActor).options(**options, scheduling_strategy=here).remote()
        return ray.remote(StageActor).options(**options, scheduling_strategy="SPREAD").remote()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members.values():
            self._end(member, "the fleet is closed")
            ray.kill(member.actor, no_restart=True)
            if member.process is not None:
                member.process.forget()
        self._files.remove_all()
        await self._remove_elsewhere()
        self._events.put_nowait(None)

    async def _remove_elsewhere(self) -> None:
        """Files of pools on other machines where workers have been."""
        nodes = {each.place.node_id for each in self._members.values() if each.place} - {self._node_id}
        removing = []
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(_remove_files).options(num_cpus=0, scheduling_strategy=there)
            removing.append(asyncio.ensure_future(_awaited(task.remote(self._fleet_id))))
        if removing:  # one that is gone has none any more
            await asyncio.wait(removing, timeout=_REMOVE_S)
            for each in removing:
                each.add_done_callback(_noted)
                each.cancel()

    # Messages

    async def send(
        self,
        stage: Stage,  # noqa: ARG002 - a worker takes messages for all of its roles in one place
        target: str,
        message: Message[ReplyT],
        bulk: Bulk | None = None,
    ) -> ReplyT:
        reply = await self._call(target, message, bulk, is_fetch=False)
        return cast(ReplyT, reply)

    async def fetch(
        self,
        stage: Stage,  # noqa: ARG002 - as above
        target: str,
        message: Message[None],
    ) -> Bulk:
        return await self._call(target, message, None, is_fetch=True)

    async def _call(self, target: str, message: Message[Any], bulk: Bulk | None, *, is_fetch: bool) -> Any:
        member = self._members[target]
        if not member.info.is_alive:
            raise WorkerLostError(f"worker '{target}' is gone; it is being started again")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        member.calls.add(reply)
        reply.add_done_callback(member.calls.discard)
        self._outbox.put_nowait(_Call(member, member.life, message, bulk, is_fetch, reply))
        if isinstance(message, SetRoles):
            member.info = replace(member.info, roles=message.roles)
        return await reply

    async def _send_all(self) -> None:
        """Sends from a task of the fleet's own: Ray cancels what a task that is cancelled has begun."""
        while True:
            call = await self._outbox.get()
            member = call.member
            if call.life != member.life or not member.info.is_alive:
                continue  # it has been failed with the worker
            try:
                self._post(call)
            except Exception as error:  # the process boundary: nothing has been sent
                logger.exception("a message to %s was not sent", member.info.name)
                call.reply.set_exception(UnavailableError(f"{type(error).__name__}: {error}"))

    def _post(self, call: _Call) -> None:
        member = call.member
        if call.is_fetch:
            refs = member.actor.fetch.options(num_returns=2).remote(call.life, call.message)
            self._spawn(self._take_reply(call, refs[0], refs[1]))
            return
        bulk = [] if call.bulk is None else [call.bulk]
        ref = member.actor.handle.remote(call.life, member.num_sent, call.message, bulk)
        member.num_sent += 1
        self._spawn(self._take_reply(call, ref, None))

    async def _take_reply(self, call: _Call, ref: Any, bulk: Any) -> None:
        try:
            reply: Reply = await ref
        except RayActorError as error:
            if call.life == call.member.life:
                call.member.fail(f"{type(error).__name__}")
            return
        except RayError as error:
            reply = Reply(error=UnavailableError(f"{type(error).__name__}: {error}"))
        if call.reply.done():
            return
        if reply.error is not None:
            call.reply.set_exception(reply.error)
        else:
            call.reply.set_result(reply.value if bulk is None else bulk)

    async def events(self) -> AsyncIterator[FleetEvent]:
        while True:
            event = await self._events.get()
            if event is None:
                return
            yield event

    # Life of a worker

    async def _bring_up(self, member: _Member) -> None:
        """Returns when the worker is ready for its first message. Raises EPDError, RayError, TimeoutError."""
        async with asyncio.timeout(self._config.start_s):
            place = await self._find(member)
            member.life = secrets.token_hex(8)
            start = Start(member.info.name, member.life, member.info.roles, self._settings, self._fleet_id)
            more = (self._config.num_video_threads,) if member.is_video else ()
            reply: Reply = await member.actor.start.remote(start, *more)
        if reply.error is not None:
            raise reply.error
        member.num_sent = 0
        member.lost = asyncio.get_running_loop().create_future()
        member.place = place
        if place.node_id == self._node_id:
            member.process = WatchedProcess(place.pid, member.fail)
        member.info = replace(member.info, is_alive=True)

    async def _find(self, member: _Member) -> Place:
        """Where the process is, as soon as one answers that is not the one of the last life."""
        while True:
            try:
                place: Place = await member.actor.place.remote()
            except RayActorError:
                await asyncio.sleep(_RETRY_S)
                continue
            if place != member.place:
                return place
            ray.kill(member.actor, no_restart=False)
            await asyncio.sleep(_RETRY_S)

    async def _introduce(self) -> None:
        """Tells all workers about all."""
        alive = [each for each in self._members.values() if each.info.is_alive and not each.is_video]
        peers = {
            each.info.name: Peer(each.actor, each.life, each.place.node_id) for each in alive if each.place
        }
        told = [asyncio.ensure_future(_awaited(each.actor.meet.remote(peers))) for each in alive]
        if told:  # one that hangs, or dies meanwhile, need not know
            await asyncio.wait(told, timeout=self._config.hang_s)
            await asyncio.gather(*(each for each in told if each.done()), return_exceptions=True)

    async def _keep(self, member: _Member) -> None:
        """Follows a worker through its lives."""
        while True:
            reason = await self._follow(member)
            self._lose(member, reason)
            await self._bring_back(member)
            self._events.put_nowait(WorkerBack(member.info.name))

    async def _follow(self, member: _Member) -> str:
        """Hands out its reports until it is lost. Returns why it is."""
        assert member.lost is not None
        config = self._config
        while True:
            beat = asyncio.ensure_future(_awaited(member.actor.beat.remote(member.life, config.beat_s)))
            beat.add_done_callback(_noted)
            await asyncio.wait(
                {beat, member.lost}, timeout=config.hang_s, return_when=asyncio.FIRST_COMPLETED
            )
            if member.lost.done():
                beat.cancel()
                return member.lost.result()
            if not beat.done():
                beat.cancel()
                return self._give_up(member, f"no sign of life for {config.hang_s:g} s")
            if beat.exception() is not None:
                return f"{type(beat.exception()).__name__}"
            reason = self._take_beat(beat.result())
            if reason:
                return self._give_up(member, reason)

    def _take_beat(self, beat: Beat) -> str:
        """Hands out its reports. Returns why the worker is to be given up, if it is."""
        for report in beat.reports:
            self._events.put_nowait(report)
        if beat.busy_s > self._config.max_step_s:
            return f"a step of {beat.busy_s:.0f} s"
        return beat.failure

    def _give_up(self, member: _Member, reason: str) -> str:
        """For a process that may still be there: one of another machine is ended by Ray, in some seconds."""
        if member.process is None:
            ray.kill(member.actor, no_restart=False)
        return reason

    def _lose(self, member: _Member, reason: str) -> None:
        """This life is over: the process, whatever it does, is ended, and Ray starts another."""
        name = member.info.name
        logger.warning("worker %s is lost: %s", name, reason)
        member.info = replace(member.info, is_alive=False)
        if member.process is not None:
            member.process.kill()
            member.process = None
        self._files.remove_of(name)
        self._end(member, reason)
        self._events.put_nowait(WorkerLost(name, reason))

    def _end(self, member: _Member, reason: str) -> None:
        error = f"worker '{member.info.name}' is gone: {reason}; send to another worker"
        for reply in list(member.calls):
            if not reply.done():
                reply.set_exception(WorkerLostError(error))

    async def _bring_back(self, member: _Member) -> None:
        member.info = replace(member.info, incarnation=member.info.incarnation + 1)
        while True:
            try:
                await self._bring_up(member)
                await self._introduce()
            except (EPDError, RayError, TimeoutError, OSError) as error:
                logger.warning("worker %s does not start: %s", member.info.name, error)
                ray.kill(member.actor, no_restart=False)
                await asyncio.sleep(self._config.restart_s)
            else:
                return

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _remove_files(fleet_id: str) -> None:
    PoolFiles(fleet_id).remove_all()


async def _awaited(ref: Any) -> Any:
    return await ref


def _noted(task: asyncio.Task[Any]) -> None:
    """An error that comes after the worker was given up is no news."""
    if not task.cancelled():
        task.exception()
