"""Serves the stages of one worker to fronts and other workers, over links.

fronts    --messages, in order-->  event loop  --inbox-->  worker thread: messages, step, report
          <--reports: of each front's requests alone, at once; the load, often enough--
workers   --deliveries: offers, receipts, repeated until acknowledged-->
media     <--frames are fetched from where they are, before their message is handled--
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from epd.control.recent import Recent
from epd.errors import EPDError, InternalError
from epd.serve_app.fleet import FramesLostError, WorkerLostError, state_after
from epd.serve_app.messages import DropOwner, Message, PeerLost, WorkerLoad, WorkerReport, by_owner
from epd.serve_app.network.calls import Answer, Channel, Channels
from epd.serve_app.network.connector import Envelope, TransportConfig
from epd.serve_app.network.link import Address, Link, LinkClosedError
from epd.serve_app.network.members import (
    BoardClient,
    Hello,
    KnownFronts,
    Member,
    ProcessAddress,
    Purpose,
    View,
)
from epd.serve_app.network.membership import Membership
from epd.serve_app.network.memory import PoolFiles
from epd.serve_app.network.peer_links import Delivery, KnownPeers, PeerLinks
from epd.serve_app.network.process_transport import ProcessTransport
from epd.serve_app.network.routes import PeerPlace
from epd.serve_app.network.wire import BulkPlace, FrontLost, TakeBulk, WorkerCall
from epd.serve_app.role_messages import AskRemaining, Offload
from epd.serve_app.task_group import Loops, Tasks
from epd.serve_app.worker.worker_settings import WorkerSettings
from epd.serve_app.worker.worker_thread import Call, WorkerCallbacks, WorkerThread
from epd.serve_app.worker_info import EVERY_STAGE, WorkerInfo
from epd.stages.connectors.gpu_memory import CudaMemory
from epd.types import UInt8Array

logger = logging.getLogger(__name__)

_LOAD_S = 0.25  # between reports of the load to fronts that have nothing else to hear
_WATCH_S = 1.0  # between looks at the worker's thread
_POLL_S = 0.02  # between checks of what a worker that leaves still has
_MAX_REMEMBERED = 256  # addresses of media workers


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another stage worker, in one epoch."""

    address: Address
    epoch: str
    node_id: str
    name: str
    incarnation: int
    gpus: tuple[str, ...] = ()

    @property
    def place(self) -> PeerPlace:
        return PeerPlace(self.epoch, self.node_id, self.gpus)


@dataclass(frozen=True, slots=True)
class WorkerServerConfig:
    """Configures a `WorkerServer`.

    purpose: with the topology that is wanted; the board decides which part of it this worker is
    num_threads: of torch
    max_step_s: a worker that is busy with a single step for this time ends
    transport: bounds of what is on its way to other workers
    """

    settings: WorkerSettings
    purpose: Purpose
    num_threads: int = 1
    max_step_s: float = 120.0
    transport: TransportConfig = field(default_factory=TransportConfig)


class WorkerServer:
    """Runs one worker. Used from one event loop. on_end: see `Membership`; also called when it fails."""

    def __init__(self, board: BoardClient, place: ProcessAddress, config: WorkerServerConfig) -> None:
        self.membership = Membership(board, "stage", place, config.purpose)
        self._config = config
        self._place = place
        self._fronts: dict[str, _FrontSession] = {}
        self._known_fronts = KnownFronts()
        self._peers: dict[str, _Peer] = {}
        self.met = KnownPeers(config.purpose.hang_s)
        self._media_addresses: set[Address] = set()
        self._lost_media: Recent[Address, bool] = Recent(_MAX_REMEMBERED)
        self._thread: WorkerThread | None = None
        self._files: PoolFiles | None = None
        self._transport: ProcessTransport | None = None
        self._links: PeerLinks[_Peer] | None = None
        self._channels: Channels | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._load = WorkerLoad()
        self._loops = Loops(Counter(), lambda loop: self.membership.on_ended(f"its loop '{loop}' has ended"))
        self._tasks = Tasks()
        self.is_healthy = True

    @property
    def info(self) -> WorkerInfo:
        return self.membership.info

    async def start(self) -> None:
        """Joins, loads the weights of the roles it is given, and takes work. Raises EPDError."""
        torch.set_num_threads(self._config.num_threads)
        self._loop = asyncio.get_running_loop()
        await self.membership.join(self._accept)
        self.membership.on_view = self._take_view
        self._loops.start("board", self.membership.run)
        self.met.meet([_peer(self.membership.member)])
        name, credentials = self.info.name, self.membership.credentials
        self._files = PoolFiles(credentials.fleet_id)
        self._files.hold()
        self._files.remove_of(name)
        self._channels = Channels(credentials.key, Hello("stage", self.membership.epoch))
        self._links = PeerLinks(name, self.membership.epoch, self._deliver)
        self._transport = self._new_transport(self._files)
        listener = WorkerCallbacks(self._report, self._fail)
        self._thread = WorkerThread(name, self.info.roles, self._config.settings, self._transport, listener)
        await self._thread.start()
        self._loops.start("messages", self._links.run)
        self._loops.start("load", self._report_load)
        self._loops.start("watch", self._watch_thread)
        await self.membership.update(is_ready=True)

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new work, waits until none is left, and leaves. Returns whether all was completed."""
        is_over = False
        if self._thread is not None and self.is_healthy:
            offload = Offload(frozenset(), EVERY_STAGE)
            self._set_info(state_after(self.info, offload))
            with suppress(TimeoutError, EPDError):
                async with asyncio.timeout(timeout_s):
                    await self.membership.update()  # now: a worker that comes takes its place
                    await self._ask(offload)
                    while not (await self._ask(AskRemaining(EVERY_STAGE))).is_over:
                        await asyncio.sleep(_POLL_S)
                    is_over = True
        await self.membership.leave()
        return is_over

    async def close(self) -> None:
        """Ends the worker with what it has. May be called again."""
        self.is_healthy = False
        await self.membership.leave()
        await self._loops.close()
        self._tasks.cancel()
        await self._tasks.wait()
        if self._thread is not None:
            self._thread.stop()
            await asyncio.to_thread(self._thread.join, 10.0)
        if self._links is not None:
            await self._links.close()
        if self._channels is not None:
            self._channels.close()
        if self._files is not None:
            self._files.release()

    # Links

    def _accept(self, link: Link) -> None:
        channel = Channel(link)
        channel.on_push = partial(self._greet, channel)

    def _greet(self, channel: Channel, hello: Hello) -> None:
        if hello.kind == "front":
            self._known_fronts.add(hello)
            self._fronts[hello.epoch] = _FrontSession(self, channel)
            channel.push(self.info)
        elif hello.kind == "stage":
            channel.on_call = self._take_delivery

    def _take_delivery(self, delivery: Delivery, answer: Answer) -> None:
        if self._links is None or self._transport is None or self._thread is None:
            raise LinkClosedError("the worker is starting")
        if not self.met.knows(delivery.epoch):
            raise LinkClosedError("the sender is not known here yet: it could not be answered")
        envelopes, next_number = self._links.take(delivery)
        for envelope in envelopes:
            self._transport.deliver(envelope)
        self._thread.wake()
        answer(next_number)

    async def _deliver(self, peer: _Peer, delivery: Delivery) -> int | None:
        assert self._channels is not None
        next_number: int | None = await self._channels.call(peer.address, delivery)
        return next_number

    async def fetch_bulk(self, place: BulkPlace) -> UInt8Array:
        """Fetches frames. Raises FramesLostError if they are gone."""
        assert self._channels is not None
        if self._lost_media.get(place.address):
            raise FramesLostError("the media worker that read the frames is lost; have them decoded again")
        try:
            frames: UInt8Array = await self._channels.call(place.address, TakeBulk(place.number))
        except LinkClosedError as error:
            raise FramesLostError(f"the frames are lost: {error}; have them decoded again") from error
        return frames

    def _post(self, worker: str, envelope: Envelope) -> None:
        """Posts from the worker thread. A worker that is gone never reads the message."""
        assert self._loop is not None
        assert self._links is not None
        assert self._transport is not None
        if worker == self.info.name:
            self._transport.deliver(envelope)
        else:
            with suppress(RuntimeError):  # the event loop has ended, and with it the process
                self._loop.call_soon_threadsafe(self._links.send, worker, envelope)

    def _new_transport(self, files: PoolFiles) -> ProcessTransport:
        """Creates the transport, and says on the board which GPUs' memory this process can open."""
        gpu_memory = CudaMemory()
        if self._config.settings.placement().is_cuda:
            self.membership.set(gpus=tuple(sorted(gpu_memory.visible())))
        here = PeerPlace(self.membership.epoch, self._place.node_id)
        config = self._config.transport
        return ProcessTransport(
            self._post, self._find, files, here, gpu_memory=gpu_memory, config=config, wake=self._wake
        )

    def _wake(self) -> None:
        if self._thread is not None:
            self._thread.wake()

    def _find(self, worker: str) -> PeerPlace | None:
        """Returns where a worker is. Called by the worker thread."""
        if worker == self.info.name:
            return PeerPlace(self.membership.epoch, self._place.node_id)
        peer = self._peers.get(worker)
        return None if peer is None else peer.place

    # The board

    def _take_view(self, view: View) -> None:
        model = self._config.purpose.model
        stages = [each for each in view.of_kind("stage") if each.is_ready and each.model == model]
        peers = {peer.name: peer for peer in map(_peer, stages) if peer.epoch != self.membership.epoch}
        for name, peer in self._peers.items():
            if name not in peers or peers[name].incarnation != peer.incarnation:
                self._lose_peer(peer)
        self._peers = peers
        if self._links is not None:
            self._links.meet(peers)
        self.met.meet(map(_peer, stages))
        self._follow_media(view)
        for owner in self._known_fronts.lost(view):
            self._drop_front(owner)

    def _follow_media(self, view: View) -> None:
        """Ends links to media workers that are gone: that of a lost machine would not end by itself."""
        there = {member.address for member in view.of_kind("media")}
        for address in self._media_addresses - there:
            self._lost_media.set(address, True)
            if self._channels is not None:
                self._channels.forget(address)
        for address in there - self._media_addresses:
            self._lost_media.set(address, False)
        self._media_addresses = there

    def _lose_peer(self, peer: _Peer) -> None:
        if self._thread is not None and self._files is not None and self._channels is not None:
            self._put(PeerLost(peer.name, peer.incarnation))
            self._channels.forget(peer.address)
            if peer.node_id == self._place.node_id:
                self._files.remove_ended(peer.name)

    def _drop_front(self, owner: str) -> None:
        session = self._fronts.pop(owner, None)
        if session is not None:
            session.channel.push(FrontLost())
            session.channel.close("the front was declared lost")
        if self._thread is not None:
            self._put(DropOwner(owner))

    def _set_info(self, info: WorkerInfo) -> None:
        """Notes that the worker's state has changed, and informs the fronts and the board."""
        if info != self.info:
            self.membership.set(info=info)
            self._tasks.spawn(self.membership.update())
            for session in self._fronts.values():
                session.channel.push(info)

    # The worker thread

    def handle(self, message: Message[Any], frames: UInt8Array | None) -> asyncio.Future[Any]:
        """Gives the thread a message. Returns the future of its reply."""
        if self._thread is None:
            raise WorkerLostError("the worker is starting; send to another")
        self._set_info(state_after(self.info, message))
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._thread.put(Call(message, frames, reply))
        return reply

    def _put(self, message: Message[Any]) -> None:
        self.handle(message, None).add_done_callback(_noted)

    async def _ask(self, message: Message[Any]) -> Any:
        return await self.handle(message, None)

    def _report(self, report: WorkerReport) -> None:
        self._load = report.load
        is_load_only = not (report.events or report.outputs)
        for owner, part in by_owner(report, self._fronts).items():
            if is_load_only or part.events or part.outputs:
                self._fronts[owner].push(part)

    async def _report_load(self) -> None:
        """Informs fronts of the load that have no requests here."""
        while True:
            await asyncio.sleep(_LOAD_S)
            for session in self._fronts.values():
                if session.reported != self._load:
                    session.push(WorkerReport(self.info.name, load=self._load))

    async def _watch_thread(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._thread is not None and self._thread.busy_s > self._config.max_step_s:
                self._fail(f"a step of {self._thread.busy_s:.0f} s")

    def _fail(self, reason: str) -> None:
        self.is_healthy = False
        logger.error("the worker ends: %s", reason)
        self.membership.on_ended(reason)


class _FrontSession:
    """Takes a front's messages in order: one waits for what it needs, and those behind it for that."""

    def __init__(self, server: WorkerServer, channel: Channel) -> None:
        self.channel = channel
        self.reported: WorkerLoad | None = None
        self._server = server
        self._waiting: deque[tuple[WorkerCall, asyncio.Future[UInt8Array] | None, Answer]] = deque()
        self._tasks = Tasks()
        channel.on_call = self._take
        channel.on_close = lambda _reason: self._end()

    def push(self, report: WorkerReport) -> None:
        self.reported = report.load
        self.channel.push(report)

    def _take(self, call: WorkerCall, answer: Answer) -> None:
        is_ready = self._server.met.is_ready_for(call.message)
        if is_ready and not isinstance(call.bulk, BulkPlace) and not self._waiting:
            self._handle(call.message, call.bulk, answer)
            return
        fetching = None
        if isinstance(call.bulk, BulkPlace):
            fetching = asyncio.ensure_future(self._server.fetch_bulk(call.bulk))
        self._waiting.append((call, fetching, answer))
        if len(self._waiting) == 1:
            self._tasks.spawn(self._take_waiting())

    def _end(self) -> None:
        self._tasks.cancel()
        for _, fetching, _ in self._waiting:
            if fetching is not None:
                fetching.cancel()

    async def _take_waiting(self) -> None:
        while self._waiting:
            call, fetching, answer = self._waiting[0]
            try:
                frames = call.bulk if fetching is None else await fetching
                await self._server.met.wait_for(call.message)
                assert not isinstance(frames, BulkPlace)
                self._handle(call.message, frames, answer)
            except EPDError as error:
                answer(error)
            except Exception as error:  # a bug may not hold up the messages behind it
                logger.exception("the frames of a message were not fetched")
                answer(InternalError.of(error))
            finally:
                self._waiting.popleft()

    def _handle(self, message: Message[Any], frames: UInt8Array | None, answer: Answer) -> None:
        try:
            reply = self._server.handle(message, frames)
        except EPDError as error:
            answer(error)
        else:
            reply.add_done_callback(partial(_pass_on, answer))


def _pass_on(answer: Answer, reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled():
        error = reply.exception()
        answer(reply.result() if error is None else error)


def _noted(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled() and reply.exception() is not None:
        logger.error("a message was refused", exc_info=reply.exception())


def _peer(member: Member) -> _Peer:
    assert member.info is not None
    name, incarnation = member.info.name, member.info.incarnation
    return _Peer(member.address, member.epoch, member.node_id, name, incarnation, member.gpus)
