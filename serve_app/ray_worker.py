"""Worker processes: Ray actors that carry messages to a `WorkerCore` or a `FrameReader`, and news from it.

    fleet     --handle, in numbered order-->  event loop  --inbox-->  worker thread: messages, step, report
              <--beat: reports, several per reply, at once when there are any--
    workers   --deliver: offers, receipts-->

An actor that was started again is another one: each `start` gives it a new life, and calls name the life
that they are meant for.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
import torch

from epd.errors import EPDError
from epd.routing import Stage
from epd.types import UInt8Array
from serve_app.fleet import WorkerLostError
from serve_app.frame_reader import FrameReader
from serve_app.messages import CloseStream, Message, WorkerLoad, WorkerReport
from serve_app.ray_connector import Envelope, RayTransport
from serve_app.ray_memory import PoolFiles
from serve_app.ray_thread import ActorThread, Call
from serve_app.worker_stages import WorkerSettings
from serve_app.worker_thread import fault_of

logger = logging.getLogger(__name__)

# Frames, or a reference to frames; in a list, so that Ray does not wait for it before the call.
BulkArgument = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker process is."""

    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker is started with.

    life: of this start alone. fleet_id: see `PoolFiles`. num_threads: of torch, or that read video.
    """

    name: str
    life: str
    roles: frozenset[Stage]
    settings: WorkerSettings
    fleet_id: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker as one reaches it. actor: its handle."""

    actor: Any
    life: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a message: its reply, or the error to be raised at the sender."""

    value: Any = None
    error: EPDError | None = None


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life. busy_s: how long the step under way has taken. failure: why the worker does no more."""

    reports: tuple[WorkerReport, ...] = ()
    busy_s: float = 0.0
    failure: str = ""


class Line:
    """Lets calls pass in the order of their numbers, from 0, whatever the order in which they come."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Event] = {}

    async def wait(self, number: int) -> None:
        """Returns when all before have passed."""
        if number != self._next:
            event = self._waiting[number] = asyncio.Event()
            await event.wait()

    def passed(self) -> None:
        """The call whose turn it was is through."""
        self._next += 1
        event = self._waiting.pop(self._next, None)
        if event is not None:
            event.set()


class StageActor:
    """A worker with the roles encode, prefill or decode."""

    def __init__(self) -> None:
        self._life = ""
        self._line = Line()
        self._thread: ActorThread | None = None
        self._transport: RayTransport | None = None
        self._peers: Mapping[str, Peer] = {}
        self._name = ""
        self._node_id = ray.get_runtime_context().get_node_id()

    async def place(self) -> Place:
        return Place(self._node_id, os.getpid())

    async def start(self, start: Start) -> Reply:
        """Loads the weights. Whatever an earlier life has left on this machine is removed."""
        torch.set_num_threads(start.num_threads)
        files = PoolFiles(start.fleet_id)
        files.hold()
        files.remove_of(start.name)
        self._name, self._life = start.name, start.life
        self._transport = RayTransport(self._post, self._can_map, files)
        self._thread = ActorThread(start.name, start.roles, start.settings, self._transport)
        try:
            await self._thread.start()
        except EPDError as error:
            return Reply(error=error)
        return Reply()

    async def meet(self, peers: Mapping[str, Peer]) -> None:
        """From now on these are the other workers."""
        self._peers = peers

    async def handle(self, life: str, number: int, message: Message[Any], bulk: BulkArgument) -> Reply:
        """Messages pass in the order of their numbers."""
        if life != self._life or self._thread is None:
            return Reply(error=WorkerLostError("the worker was started again meanwhile; send to another"))
        frames, error = await _frames(bulk)
        await self._line.wait(number)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if error is None:
            self._thread.put(Call(message, frames, reply))
        else:
            reply.set_exception(error)
        self._line.passed()
        try:
            return Reply(await reply)
        except EPDError as error:
            return Reply(error=error)

    async def deliver(self, life: str, envelope: Envelope) -> None:
        if life == self._life and self._transport is not None and self._thread is not None:
            self._transport.deliver(envelope)
            self._thread.wake()

    async def beat(self, life: str, wait_s: float) -> Beat:
        """Returns at once when there are reports, else after `wait_s`."""
        if life != self._life or self._thread is None:
            return Beat(failure="it was started again")
        reports = await self._thread.take_reports(wait_s)
        return Beat(tuple(reports), self._thread.busy_s, self._thread.failure)

    def _post(self, worker: str, envelope: Envelope) -> None:
        """From the worker thread. A worker that is gone, or not known yet, never reads it."""
        if worker == self._name:
            assert self._transport is not None
            self._transport.deliver(envelope)
        elif (peer := self._peers.get(worker)) is not None:
            peer.actor.deliver.remote(peer.life, envelope)

    def _can_map(self, worker: str) -> bool:
        peer = self._peers.get(worker)
        return worker == self._name or (peer is not None and peer.node_id == self._node_id)


async def _frames(bulk: BulkArgument) -> tuple[UInt8Array | None, EPDError | None]:
    if not bulk:
        return None, None
    try:
        return (await bulk[0] if isinstance(bulk[0], ray.ObjectRef) else bulk[0]), None
    except ray.exceptions.RayError as error:
        return None, WorkerLostError(f"the frames are lost: {type(error).__name__}; have them decoded again")


class VideoActor:
    """A worker that decodes video: frames of one group for each call, several calls at once."""

    def __init__(self) -> None:
        self._life = ""
        self._name = ""
        self._reader = FrameReader()
        self._executor: ThreadPoolExecutor | None = None
        self._node_id = ray.get_runtime_context().get_node_id()

    async def place(self) -> Place:
        return Place(self._node_id, os.getpid())

    async def start(self, start: Start) -> Reply:
        self._name, self._life = start.name, start.life
        self._executor = ThreadPoolExecutor(start.num_threads, thread_name_prefix="video")
        return Reply()

    async def handle(self, life: str, _number: int, message: Message[Any], _bulk: BulkArgument) -> Reply:
        """Carried out at once, whatever the number: streams tell by themselves what comes after their end."""
        reply, _ = await self.fetch(life, message)
        return reply

    async def fetch(self, life: str, message: Message[Any]) -> tuple[Reply, UInt8Array | None]:
        """The frames are a return value of their own, which stays where it is."""
        if life != self._life or self._executor is None:
            return Reply(error=WorkerLostError("the worker was started again; send to another")), None
        loop = asyncio.get_running_loop()
        try:
            if isinstance(message, CloseStream):  # at once: every thread may be reading
                value, frames = self._reader.handle(message)
            else:
                value, frames = await loop.run_in_executor(self._executor, self._reader.handle, message)
        except EPDError as error:
            return Reply(error=error), None
        except Exception as error:  # a group that the code cannot read costs its request alone
            logger.exception("worker %s failed on a message", self._name)
            return Reply(error=fault_of(self._name, message, error)), None
        return Reply(value), frames

    async def beat(self, life: str, wait_s: float) -> Beat:
        if life != self._life:
            return Beat(failure="it was started again")
        await asyncio.sleep(wait_s)
        report = WorkerReport(self._name, load=WorkerLoad(num_running=len(self._reader)))
        return Beat((report,), self._reader.busy_s)
