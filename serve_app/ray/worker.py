"""Defines worker processes: Ray actors that carry messages to a `WorkerCore` or `MediaWorker`, and reports.

    fleet     --handle, in numbered order-->  event loop  --inbox-->  worker thread: messages, step, report
              <--beat: reports, several per reply, at once when there are any--
    workers   --deliver: offers, receipts, repeated until acknowledged-->

A restarted actor counts as another one: each `start` gives it a new epoch, and calls name the epoch that they
are meant for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch

from epd.errors import EPDError
from epd.topology import Stage
from epd.types import UInt8Array
from serve_app.fleet import WorkerLostError
from serve_app.media.media_processes import MediaProcesses
from serve_app.media.media_worker import MediaSettings, MediaWorker
from serve_app.messages import Message, WorkerReport
from serve_app.network.connector import Envelope, ProcessTransport
from serve_app.network.memory import PoolFiles
from serve_app.network.peer_links import Delivery, PeerLinks
from serve_app.ray.thread import ActorThread
from serve_app.task_group import Loops
from serve_app.worker.worker_stages import WorkerSettings
from serve_app.worker.worker_thread import Call, fault_of

logger = logging.getLogger(__name__)

_MAX_GAP_S = 60.0  # for a message to arrive whose successors are already there
# Frames, or a reference to frames; in a list, so that Ray does not wait for it before the call.
BulkArgument = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a worker process."""

    node_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments that a worker is started with.

    epoch: unique to this start
    fleet_id: see `PoolFiles`
    num_threads: of torch
    media: settings of a media worker
    """

    name: str
    epoch: str
    roles: frozenset[Stage]
    settings: WorkerSettings
    fleet_id: str
    num_threads: int
    media: MediaSettings


@dataclass(frozen=True, slots=True)
class Peer:
    """The contact data of another worker. actor: its handle."""

    actor: Any
    epoch: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a message: its reply, or the error to be raised at the sender."""

    value: Any = None
    error: EPDError | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat. busy_s: duration of the current step so far. failure: why the worker has stopped."""

    reports: tuple[WorkerReport, ...] = ()
    busy_s: float = 0.0
    failure: str = ""


class CallSequencer:
    """Lets calls pass in the order of their numbers, from 0, whatever their order of arrival.

    A call has passed when it calls `passed`, also if it gave up before its turn, so that it leaves no gap.
    """

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self._passed: set[int] = set()

    async def wait(self, number: int, limit_s: float | None = None) -> None:
        """Returns when all earlier calls have passed. Raises TimeoutError if one of them does not arrive."""
        if number != self._next:
            event = self._waiting[number] = asyncio.Event()
            async with asyncio.timeout(limit_s):
                await event.wait()

    def passed(self, number: int) -> None:
        """Notes that the call with this number is complete, whether it waited for its turn or not."""
        self._waiting.pop(number, None)
        self._passed.add(number)
        while self._next in self._passed:
            self._passed.remove(self._next)
            self._next += 1
        event = self._waiting.pop(self._next, None)
        if event is not None:
            event.set()


class StageActor:
    """Runs a worker with the roles encode, prefill or decode."""

    def __init__(self) -> None:
        self._epoch = ""
        self._line = CallSequencer()
        self._thread: ActorThread | None = None
        self._transport: ProcessTransport | None = None
        self._links: PeerLinks[Peer] | None = None
        self._loops = Loops(Counter(), self._break)
        self._failure = ""
        self._peers: Mapping[str, Peer] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._name = ""
        self._node_id = ray.get_runtime_context().get_node_id()

    async def place(self) -> Place:
        return Place(self._node_id, os.getpid())

    async def start(self, start: Start) -> Reply:
        """Loads the weights. Removes whatever an earlier epoch has left on this machine."""
        torch.set_num_threads(start.num_threads)
        files = PoolFiles(start.fleet_id)
        files.hold()
        files.remove_of(start.name)
        self._name, self._epoch = start.name, start.epoch
        self._loop = asyncio.get_running_loop()
        self._links = PeerLinks(start.name, start.epoch, _deliver)
        self._loops.start("messages", self._links.run)
        self._transport = ProcessTransport(self._post, self._can_map, files)
        self._thread = ActorThread(start.name, start.roles, start.settings, self._transport)
        try:
            await self._thread.start()
        except EPDError as error:
            return Reply(error=error)
        return Reply()

    async def meet(self, peers: Mapping[str, Peer]) -> None:
        """Replaces the known other workers."""
        self._peers = peers
        if self._links is not None:
            self._links.meet(peers)

    async def handle(self, epoch: str, number: int, message: Message[Any], bulk: BulkArgument) -> Reply:
        """Handles a message; messages pass in the order of their numbers."""
        if epoch != self._epoch or self._thread is None:
            return Reply(error=WorkerLostError("the worker was started again meanwhile; send to another"))
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            frames, error = await _frames(bulk)
            await self._line.wait(number, _MAX_GAP_S)
            if error is None:
                self._thread.put(Call(message, frames, reply))
            else:
                reply.set_exception(error)
        except TimeoutError:
            self._failure = f"a message before number {number} did not come for {_MAX_GAP_S:g} s"
            return Reply(error=WorkerLostError(f"worker '{self._name}' has lost a message; send to another"))
        finally:
            self._line.passed(number)
        try:
            return Reply(await reply)
        except EPDError as error:
            return Reply(error=error)

    async def deliver(self, epoch: str, delivery: Delivery) -> int | None:
        """Takes a delivery from another worker. Returns the acknowledgement; None if for another epoch."""
        if epoch != self._epoch or self._transport is None or self._thread is None or self._links is None:
            return None
        envelopes, next_number = self._links.take(delivery)
        for envelope in envelopes:
            self._transport.deliver(envelope)
        self._thread.wake()
        return next_number

    async def beat(self, epoch: str, wait_s: float) -> Heartbeat:
        """Returns at once when there are reports, else after `wait_s`."""
        if epoch != self._epoch or self._thread is None:
            return Heartbeat(failure="it was started again")
        reports = await self._thread.take_reports(wait_s)
        return Heartbeat(tuple(reports), self._thread.busy_s, self._thread.failure or self._failure)

    def _post(self, worker: str, envelope: Envelope) -> None:
        """Posts from the worker thread. A worker that is gone, or not known yet, never reads the message."""
        assert self._transport is not None
        assert self._links is not None
        assert self._loop is not None
        if worker == self._name:
            self._transport.deliver(envelope)
        else:
            with suppress(RuntimeError):  # the event loop has ended, and with it the process
                self._loop.call_soon_threadsafe(self._links.send, worker, envelope)

    def _break(self, loop: str) -> None:
        self._failure = f"its loop '{loop}' has ended"

    def _can_map(self, worker: str) -> bool:
        peer = self._peers.get(worker)
        return worker == self._name or (peer is not None and peer.node_id == self._node_id)


async def _deliver(peer: Peer, delivery: Delivery) -> int | None:
    next_number: int | None = await peer.actor.deliver.remote(peer.epoch, delivery)
    return next_number


async def _frames(bulk: BulkArgument) -> tuple[UInt8Array | None, EPDError | None]:
    if not bulk:
        return None, None
    try:
        return (await bulk[0] if isinstance(bulk[0], ray.ObjectRef) else bulk[0]), None
    except ray.exceptions.RayError as error:
        return None, WorkerLostError(f"the frames are lost: {type(error).__name__}; have them decoded again")


class MediaActor:
    """Runs a media worker."""

    def __init__(self) -> None:
        self._epoch = ""
        self._name = ""
        self._processes = MediaProcesses()
        self._worker: MediaWorker | None = None
        self._node_id = ray.get_runtime_context().get_node_id()

    async def place(self) -> Place:
        return Place(self._node_id, os.getpid())

    async def start(self, start: Start) -> Reply:
        await self.close()
        self._name, self._epoch = start.name, start.epoch
        self._worker = MediaWorker(start.media, self._processes)
        # The first media need not wait for them.
        threading.Thread(target=self._processes.start, name="processes", daemon=True).start()
        return Reply()

    async def close(self) -> None:
        """Drops all media, with their files."""
        if self._worker is not None:
            self._worker.close()

    async def handle(self, epoch: str, _number: int, message: Message[Any], _bulk: BulkArgument) -> Reply:
        """Handles a message at once, whatever its number: holds and streams notice late messages."""
        reply, _ = await self.fetch(epoch, message)
        return reply

    async def fetch(self, epoch: str, message: Message[Any]) -> tuple[Reply, UInt8Array | None]:
        """Returns the reply, and frames as a separate value, which stays where it is."""
        if epoch != self._epoch or self._worker is None:
            return Reply(error=WorkerLostError("the worker was started again; send to another")), None
        try:
            value, frames = await self._worker.answer(message)
        except EPDError as error:
            return Reply(error=error), None
        except Exception as error:  # a medium that cannot be read fails its request alone
            logger.exception("worker %s failed on a message", self._name)
            return Reply(error=fault_of(self._name, message, error)), None
        return Reply(value), frames

    async def beat(self, epoch: str, wait_s: float) -> Heartbeat:
        if epoch != self._epoch or self._worker is None:
            return Heartbeat(failure="it was started again")
        await asyncio.sleep(wait_s)
        report = WorkerReport(self._name, load=self._worker.load())
        return Heartbeat((report,), self._worker.busy_s)
