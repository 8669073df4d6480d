"""Manages one worker of a `RayFleet` through its epochs: started, followed, lost, restarted.

down --bring_up--> up --dead, silent, or stuck: follow returns--> down; Ray restarts the process
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from epd.errors import UnavailableError
from epd.topology import Stage
from serve_app.fleet import Bulk, WorkerInfo, WorkerLostError
from serve_app.media.media_worker import MediaSettings
from serve_app.messages import Message, WorkerReport
from serve_app.ray.process import WatchedProcess
from serve_app.ray.worker import Heartbeat, MediaActor, Peer, Place, Reply, StageActor, Start
from serve_app.worker.worker_stages import WorkerSettings

_MAX_CALLS = 10_000  # of one actor at once, most of which wait
_RETRY_S = 0.05  # between checks whether a process is there
Spawn = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(frozen=True, slots=True)
class RayFleetConfig:
    """Configures a `RayFleet`.

    workers: roles of each, by name
    beat_s: between heartbeats of an idle worker
    hang_s: a worker without a heartbeat for this time is lost
    max_step_s: a worker that is busy with a single step for this time is lost
    start_s: time limit for a worker to be ready
    restart_s: until another attempt to start a worker
    num_threads: of torch, in each process
    media: settings of media workers, by default those for the model of the other workers
    """

    workers: Mapping[str, frozenset[Stage]]
    beat_s: float = 0.5
    hang_s: float = 10.0
    max_step_s: float = 120.0
    start_s: float = 300.0
    restart_s: float = 0.5
    num_threads: int = 1
    media: MediaSettings | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SentMessage:
    """A message in transit to one epoch of a worker. reply: its value; for a fetch, also its bulk's place."""

    epoch: str
    message: Message[Any]
    bulk: Bulk | None
    is_fetch: bool
    reply: asyncio.Future[Any]


class RayMember:
    """Manages one worker. info: messages may be sent while alive. place: of its current or last process."""

    def __init__(self, info: WorkerInfo, config: RayFleetConfig, fleet_id: str, home: str) -> None:
        """Starts without a process. home: the node that the fleet is on."""
        self.info = info
        self.place: Place | None = None
        self.is_up = False
        self.actor = _new_actor(info, fleet_id, home)
        self._config = config
        self._fleet_id = fleet_id
        self._home = home
        self._epoch = ""
        self._num_sent = 0
        self._process: WatchedProcess | None = None
        self._calls: set[asyncio.Future[Any]] = set()
        # Set with the reason when this epoch is first found to be over.
        self._lost: asyncio.Future[str] | None = None

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def is_video(self) -> bool:
        return "video" in self.info.roles

    def peer(self) -> Peer:
        """Returns how other workers reach it."""
        assert self.place is not None
        return Peer(self.actor, self._epoch, self.place.node_id)

    # Epochs

    async def bring_up(self, settings: WorkerSettings) -> None:
        """Starts the worker; returns once it is loaded. Raises EPDError, RayError, TimeoutError, OSError."""
        config = self._config
        async with asyncio.timeout(config.start_s):
            place = await self._find()
            self._epoch = secrets.token_hex(8)
            start = Start(
                name=self.name,
                epoch=self._epoch,
                roles=self.info.roles,
                settings=settings,
                fleet_id=self._fleet_id,
                num_threads=config.num_threads,
                media=config.media or MediaSettings(settings.model_path),
            )
            reply: Reply = await self.actor.start.remote(start)
        if reply.error is not None:
            raise reply.error
        self.place = place
        self._num_sent = 0
        self._lost = asyncio.get_running_loop().create_future()
        if place.node_id == self._home:
            self._process = WatchedProcess(place.pid, self.fail)
        self.is_up = True

    async def _find(self) -> Place:
        """Returns the place of the process, once one answers that is not that of the last epoch."""
        while True:
            try:
                place: Place = await self.actor.place.remote()
            except RayActorError:
                await asyncio.sleep(_RETRY_S)
                continue
            if place != self.place:
                return place
            self.restart()
            await asyncio.sleep(_RETRY_S)

    def restart(self) -> None:
        """Makes Ray end the process, within some seconds if it hangs, and start another."""
        ray.kill(self.actor, no_restart=False)

    def fail(self, reason: str) -> None:
        """Ends this epoch."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    async def follow(self, take: Callable[[WorkerReport], None]) -> str:
        """Passes on its reports until it is lost. Returns the reason."""
        assert self._lost is not None
        config = self._config
        while True:
            beat = asyncio.ensure_future(awaited(self.actor.beat.remote(self._epoch, config.beat_s)))
            beat.add_done_callback(noted)
            await asyncio.wait({beat, self._lost}, timeout=config.hang_s, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                beat.cancel()
                return self._lost.result()
            if not beat.done():
                beat.cancel()
                return self._given_up(f"no heartbeat for {config.hang_s:g} s")
            if beat.exception() is not None:
                return f"{type(beat.exception()).__name__}"
            reason = self._take(beat.result(), take)
            if reason:
                return self._given_up(reason)

    def _take(self, beat: Heartbeat, take: Callable[[WorkerReport], None]) -> str:
        """Passes on the reports of a beat. Returns why the worker must be given up, if so."""
        for report in beat.reports:
            take(report)
        if beat.busy_s > self._config.max_step_s:
            return f"a step of {beat.busy_s:.0f} s"
        return beat.failure

    def _given_up(self, reason: str) -> str:
        """Gives up a process that may still run; `lose` ends one of this machine."""
        if self._process is None:
            self.restart()
        return reason

    def lose(self, reason: str) -> None:
        """Ends the process in any state, and fails the messages sent to it."""
        number, none = self.info.incarnation + 1, frozenset[Stage]()
        self.info = replace(self.info, is_alive=False, incarnation=number, closed=none, leaving=none)
        self.is_up = False
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._fail_calls(reason)

    def end(self) -> None:
        """Ends the worker for good."""
        if self._process is not None:
            self._process.forget()
        self._fail_calls("the fleet is closed")
        ray.kill(self.actor, no_restart=True)

    async def drop_media(self) -> None:
        """Makes a media worker remove its files, if it is alive."""
        if self.is_video and self.is_up:
            with suppress(RayError):
                await self.actor.close.remote()

    # Messages

    def new_call(self, message: Message[Any], bulk: Bulk | None, *, is_fetch: bool) -> SentMessage:
        """Creates a call. Raises WorkerLostError while the worker is not alive."""
        if not self.info.is_alive:
            raise WorkerLostError(f"worker '{self.name}' is gone; it is being started again")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.add(reply)
        reply.add_done_callback(self._calls.discard)
        return SentMessage(self._epoch, message, bulk, is_fetch, reply)

    def post(self, call: SentMessage, spawn: Spawn) -> None:
        """Sends a call, unless its epoch is over. spawn: runs the task that waits for the reply."""
        if call.epoch != self._epoch or not self.info.is_alive:
            return
        if call.is_fetch:
            reply, bulk = self.actor.fetch.options(num_returns=2).remote(call.epoch, call.message)
            spawn(self._take_reply(call, reply, bulk))
            return
        bulk = [] if call.bulk is None else [call.bulk]
        reply = self.actor.handle.remote(call.epoch, self._num_sent, call.message, bulk)
        self._num_sent += 1
        spawn(self._take_reply(call, reply, None))

    async def _take_reply(self, call: SentMessage, ref: Any, bulk: Any) -> None:
        try:
            reply: Reply = await ref
        except RayActorError as error:
            if call.epoch == self._epoch:
                self.fail(type(error).__name__)
            return
        except RayError as error:
            reply = Reply(error=UnavailableError(f"{type(error).__name__}: {error}"))
        if call.reply.done():
            return
        if reply.error is not None:
            call.reply.set_exception(reply.error)
        else:
            call.reply.set_result((reply.value, bulk) if call.is_fetch else reply.value)

    def _fail_calls(self, reason: str) -> None:
        error = f"worker '{self.name}' is gone: {reason}; send to another worker"
        for reply in list(self._calls):
            if not reply.done():
                reply.set_exception(WorkerLostError(error))


def _new_actor(info: WorkerInfo, fleet_id: str, home: str) -> Any:
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": _MAX_CALLS,
        "name": f"{fleet_id}-{info.name}",
    }
    if "video" in info.roles:  # it reads files of this machine
        here = NodeAffinitySchedulingStrategy(home, soft=False)
        return ray.remote(MediaActor).options(**options, scheduling_strategy=here).remote()
    return ray.remote(StageActor).options(**options, scheduling_strategy="SPREAD").remote()


async def awaited(ref: Any) -> Any:
    return await ref


def noted(task: asyncio.Task[Any]) -> None:
    """Marks an error as read, as it occurred after the worker was given up."""
    if not task.cancelled():
        task.exception()
