"""Moves data between worker processes: offers and receipts are messages, bulk data bypasses them if it can.

`epd.serve_app.network.routes` says which way the data of an offer takes. Where the receiver cannot reach the
pool, the offer travels in parts, through host memory of bounded size.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from epd.serve_app.network.memory import PoolFiles
from epd.serve_app.network.packing import AnyPool, AnyShape, Packed, Part, PartQueue, Shipment, pack, parts_of
from epd.serve_app.network.routes import (
    Access,
    Exported,
    InRanks,
    Mapped,
    OpenedPools,
    PeerPlace,
    Registered,
    Route,
    Staged,
    choose_route,
)
from epd.stages.connectors.gpu_memory import CudaMemory, GpuMemory, HandleError
from epd.stages.connectors.mailbox import MailboxConnector, Message
from epd.stages.connectors.nixl import NixlAgent
from epd.stages.encode.encoder_pool import EncoderPool, EncoderPoolShape
from epd.stages.engine.kv_pool import KVPools, KVPoolsShape
from epd.stages.engine.pool_memory import pool_memory
from epd.stages.loading.weight_files import num_weight_bytes, write_weights
from epd.stages.placement import Placement
from epd.stages.ranks.group_pools import GroupPools, PoolSharing
from epd.transfer.connectors import EncoderConnector, KVConnector, Offer, Receipt, TransferOutcome
from epd.transfer.staging import StagingSpace
from epd.types import UInt8Array

logger = logging.getLogger(__name__)

# An end point may have one end of each kind.
Kind = Literal["embeddings", "kv"]
_CPU = torch.device("cpu")
_COPY_POLL_S = 0.001  # between checks whether the last copies into a pool that is closed are done


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Tells a sender that the receiver cannot open its pool: the offer of that number must be staged."""

    receiver: str
    number: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message for an end of a transport. access: of an offer, to what it offers."""

    receiver: str
    kind: Kind
    message: Message | Unreadable
    access: Access | None = None


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Bounds the host memory that transfers pass through.

    staging_bytes: of the segment of each pool that is staged
    link_bytes: in messages to other machines, of each pool, before they are answered
    part_bytes: of a part of an offer, unless a single block or a group of embeddings is larger
    is_staged: whether pools are staged for other workers of the machine even if they could be reached
    between_machines: the link, or NIXL
    """

    staging_bytes: int = 256 << 20
    link_bytes: int = 512 << 20
    part_bytes: int = 16 << 20
    is_staged: bool = False
    between_machines: Route = Route.LINK


@dataclass(frozen=True, slots=True, eq=False)
class StagingSegment:
    """Host memory that parts are staged in. memory: uint8. nixl: with which other machines read it."""

    path: Path
    memory: Tensor
    nixl: NixlAgent | None = None


@dataclass(frozen=True, slots=True)
class _Means:
    """What the ends of a worker have in common.

    post, find: see `ProcessTransport`
    routes: those that were taken last, by worker
    """

    post: Callable[[str, Envelope], None]
    find: Callable[[str], PeerPlace | None]
    here: PeerPlace
    gpu_memory: GpuMemory
    opened: OpenedPools
    config: TransportConfig
    routes: dict[str, Route] = field(default_factory=dict)


class ProcessTransport:
    """Holds the ends of one worker. Only `deliver` may be called from other threads."""

    def __init__(
        self,
        post: Callable[[str, Envelope], None],
        find: Callable[[str], PeerPlace | None],
        files: PoolFiles,
        here: PeerPlace,
        *,
        gpu_memory: GpuMemory | None = None,
        config: TransportConfig | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Creates a transport without ends.

        post: passes an envelope to a worker by name, without waiting
        find: says where a worker is; None if it is not known
        files: creates the files of pools
        here: where this worker is
        wake: called by another thread when what NIXL has read was delivered
        """
        gpu_memory = gpu_memory or CudaMemory()
        opened = OpenedPools(gpu_memory, self._own_pool)
        self._means = _Means(post, find, here, gpu_memory, opened, config or TransportConfig())
        self._files = files
        self._wake = wake
        self._nixl: NixlAgent | None = None  # while there are ends
        self._ends: dict[tuple[str, Kind], ProcessConnector] = {}

    def embeddings(
        self, name: str, shape: EncoderPoolShape, device: torch.device = _CPU
    ) -> tuple[EncoderPool, EncoderConnector]:
        end = self._open(name, "embeddings", shape, device)
        assert isinstance(end.pool, EncoderPool)
        return end.pool, end

    def kv(
        self,
        name: str,
        shape: KVPoolsShape,
        device: torch.device = _CPU,
        sharing: PoolSharing | None = None,
    ) -> tuple[KVPools, KVConnector]:
        end = self._open(name, "kv", shape, device, sharing)
        assert isinstance(end.pool, KVPools)
        return end.pool, end

    def weights(self, path: Path, placement: Placement) -> Path | None:
        """Returns the file of weights, written by the machine's first worker.

        None without room for it, and for a GPU, to which each worker loads its own.
        """
        if placement.is_cuda:
            return None
        dtype = placement.dtype
        num_bytes = num_weight_bytes(path, dtype)
        try:
            return self._files.shared(f"weights-{dtype}", num_bytes, partial(write_weights, path, dtype))
        except OSError:
            logger.warning("no room for %d bytes of shared weights: each worker reads its own", num_bytes)
            return None

    def routes(self) -> Mapping[str, str]:
        """Returns the way that data last took to each worker that is known: see `Route`."""
        return {name: str(route) for name, route in self._means.routes.items() if self._means.find(name)}

    def close(self, name: str) -> None:
        """Closes the ends of one name. What was offered to them and not copied is answered: see `deliver`."""
        for key in [key for key in self._ends if key[0] == name]:
            end = self._ends.pop(key)
            for offer in (*end.close(), *end.unread_offers()):
                self._refuse(end.kind, offer)
            self._files.remove(Path(end.pool_id))
            if end.segment is not None:
                self._files.remove(end.segment.path)
                if end.segment.nixl is not None:
                    end.segment.nixl.deregister(end.segment.memory)
        if not self._ends:
            self._means.opened.close()
            nixl, self._nixl = self._nixl, None
            if nixl is not None:
                nixl.close()

    def deliver(self, envelope: Envelope) -> None:
        """Delivers a message to one of the ends. If that is closed, with its pool, an offer is answered.

        So the sender's memory is free again after one message, even if whoever closed the end is lost
        before the sender hears of it. Everything else for a closed end is dropped.
        """
        nixl, access = self._nixl, envelope.access
        if nixl is None or not isinstance(access, Registered):
            self._deliver(envelope)
            return
        sender = _worker_of(envelope.message.sender) if isinstance(envelope.message, Offer) else ""
        there = self._means.find(sender)
        nixl.read(
            access.place,
            lambda: there is not None and self._means.find(sender) == there,
            partial(self._deliver_read, envelope, access.shape),
        )

    def _deliver_read(self, envelope: Envelope, shape: AnyShape, contents: UInt8Array | None) -> None:
        """Delivers an offer with what NIXL has read of it; as it came if that could not be read."""
        read = envelope if contents is None else replace(envelope, access=Packed(shape, contents))
        self._deliver(read)
        self._wake()

    def _deliver(self, envelope: Envelope) -> None:
        end = self._ends.get((envelope.receiver, envelope.kind))
        if end is not None:
            end.inbox.append(envelope)
            if self._ends.get((envelope.receiver, envelope.kind)) is end:
                return
            for offer in end.unread_offers():  # closed meanwhile, by the worker's thread
                self._refuse(end.kind, offer)
        elif isinstance(envelope.message, Offer):
            self._refuse(envelope.kind, envelope.message)

    def _refuse(self, kind: Kind, offer: Offer[Any]) -> None:
        receipt = Receipt(offer.transfer_id, offer.number, TransferOutcome.CANCELLED)
        self._means.post(_worker_of(offer.sender), Envelope(offer.sender, kind, receipt))

    def _own_pool(self, pool_id: str) -> AnyPool | None:
        return next((end.pool for end in self._ends.values() if end.pool_id == pool_id), None)

    def _open(
        self,
        name: str,
        kind: Kind,
        shape: AnyShape,
        device: torch.device,
        sharing: PoolSharing | None = None,
    ) -> ProcessConnector:
        """Opens an end. A pool of the CPU is a file that others map; one of a GPU has its segment's name."""
        if not self._means.gpu_memory.holds(device):
            path = self._files.create(f"{name}-{kind}", shape.num_bytes)
            pool = self._new_pool(shape, device, sharing, path)
            config = self._means.config
            is_staged = config.is_staged or config.between_machines is Route.NIXL
            segment = self._new_segment(name, kind) if is_staged else None
        else:
            pool = self._new_pool(shape, device, sharing)
            segment = self._new_segment(name, kind)
            path = segment.path
        end = ProcessConnector(name, kind, pool, str(path), self._means, segment)
        self._ends[name, kind] = end
        return end

    def _new_pool(
        self, shape: AnyShape, device: torch.device, sharing: PoolSharing | None, path: Path | None = None
    ) -> AnyPool:
        """Builds a pool. path: of the memory it lies in, of a CPU's."""
        if sharing is None:
            return shape.build(path, device)
        assert isinstance(shape, KVPoolsShape)
        return GroupPools(shape, sharing, device, None if path is None else self._files.place(path))

    def _new_segment(self, name: str, kind: Kind) -> StagingSegment:
        num_bytes = self._means.config.staging_bytes
        path = self._files.create(f"{name}-{kind}-staging", num_bytes)
        memory = pool_memory(num_bytes, path)
        if self._means.config.between_machines is not Route.NIXL:
            return StagingSegment(path, memory)
        if self._nixl is None:
            self._nixl = NixlAgent(f"{self._means.here.epoch}-{secrets.token_hex(4)}", self._is_read)
        self._nixl.register(memory)
        return StagingSegment(path, memory, self._nixl)

    def _is_read(self) -> bool:
        """Returns whether others may be reading parts. Called by the thread of NIXL."""
        return any(end.is_read for end in list(self._ends.values()))


class ProcessConnector(MailboxConnector[Any, Any]):
    """Connects one end of a worker. Created by `ProcessTransport`."""

    pool: AnyPool

    def __init__(
        self,
        name: str,
        kind: Kind,
        pool: AnyPool,
        pool_id: str,
        means: _Means,
        segment: StagingSegment | None,
    ) -> None:
        super().__init__(name, pool, pool_id)
        self.inbox: deque[Envelope] = deque()
        self.segment = segment
        self.kind: Kind = kind
        self._means = means
        self._gpu = means.gpu_memory.gpu(pool.memory)
        # Offers from a GPU's pool that are not answered; epochs of those who got a handle, or cannot use it.
        self._exported: dict[int, tuple[str, Offer[Any]]] = {}
        self._handed: dict[str, str] = {}
        self._unreadable: dict[str, str] = {}
        staging = StagingSpace(0 if segment is None else segment.memory.nbytes)
        self._staging = PartQueue(staging, self.numbers, self._ship_staged)
        self._linking = PartQueue(StagingSpace(means.config.link_bytes), self.numbers, self._ship_linked)
        self._access: dict[tuple[str, int], Access] = {}  # to what was offered and is not answered

    # Sending

    def offer(self, receiver: str, offer: Offer[Any]) -> None:
        if offer.source is None:
            super().offer(receiver, offer)
            return
        route = self._route(receiver)
        if route in (Route.STAGING, Route.NIXL, Route.LINK):
            route = self._offer_parts(receiver, offer, route)
        else:
            access = self._direct_access(receiver, offer, route)
            self._deferred.add(partial(self._post, receiver, offer, access))
        self._means.routes[_worker_of(receiver)] = route

    def _route(self, receiver: str) -> Route:
        there = self._means.find(_worker_of(receiver))
        may_open = there is None or self._unreadable.get(receiver) != there.epoch
        config = self._means.config
        return choose_route(
            self._gpu,
            self._means.here,
            there,
            is_staged=config.is_staged,
            may_open=may_open,
            between_machines=config.between_machines,
        )

    def _direct_access(self, receiver: str, offer: Offer[Any], route: Route) -> Access | None:
        """Returns the access of a receiver that reads the pool itself; a handle is made for each once."""
        if isinstance(self.pool, GroupPools):
            return InRanks(self.pool.places_for(offer.transfer_id))
        if route is Route.SAME_PROCESS:
            return None
        if route is Route.SHARED_MEMORY:
            return Mapped(self.pool.shape)
        self._exported[offer.number] = receiver, offer
        there = self._means.find(_worker_of(receiver))
        epoch = "" if there is None else there.epoch
        is_known = self._handed.get(receiver) == epoch
        self._handed[receiver] = epoch
        return Exported(self.pool.shape, b"" if is_known else self._means.gpu_memory.export(self.pool.memory))

    def _offer_parts(self, receiver: str, offer: Offer[Any], route: Route) -> Route:
        """Sends an offer in parts. Returns the way they take: what is too large for the segment is linked."""
        parts = parts_of(self.pool, offer.source, self._means.config.part_bytes)
        if route is not Route.LINK and self._staging.fits(parts):
            self._staging.add(receiver, offer, parts)
            return route
        if self._linking.fits(parts):
            self._linking.add(receiver, offer, parts)
        else:
            error = (
                f"{parts[0].num_bytes} bytes in one piece do not pass through {self._means.config.link_bytes}"
            )
            failed: Offer[Any] = Offer(offer.transfer_id, offer.number, self.name, self.pool_id, None, error)
            super().offer(receiver, failed)
        return Route.LINK

    def _ship_staged(self, shipment: Shipment) -> None:
        assert self.segment is not None
        memory, part = self.segment.memory, shipment.part
        self._means.gpu_memory.pin(memory)
        room = memory[shipment.offset : shipment.offset + part.num_bytes]
        part.copy(self.pool, room)
        access: Access = Staged(part.shape, str(self.segment.path), memory.nbytes, shipment.offset)
        if self.segment.nixl is not None and self._route(shipment.receiver) is not Route.STAGING:
            access = self._registered(self.segment.nixl, part, room)
        self._deferred.add(partial(self._post, shipment.receiver, shipment.offer, access))

    def _registered(self, nixl: NixlAgent, part: Part, room: Tensor) -> Access:
        """Returns the access of a receiver that reads a part with NIXL."""
        if not part.num_bytes:
            return pack(self.pool, part)
        nixl.wake()
        return Registered(part.shape, nixl.place(room))

    @property
    def is_read(self) -> bool:
        """Returns whether any part in the segment is without a receipt. Thread-safe."""
        return self._staging.has_shipped

    def _ship_linked(self, shipment: Shipment) -> None:
        packed = pack(self.pool, shipment.part)
        self._deferred.add(partial(self._post, shipment.receiver, shipment.offer, packed))

    def put(self, name: str, message: Message) -> None:
        self._post(name, message, None)

    def _post(self, name: str, message: Message | Unreadable, access: Access | None) -> None:
        self._means.post(_worker_of(name), Envelope(name, self.kind, message, access))

    def poll(self) -> Sequence[Receipt]:
        receipts: list[Receipt] = []
        for receipt in super().poll():
            self._exported.pop(receipt.number, None)
            queue = next((each for each in (self._staging, self._linking) if receipt.number in each), None)
            receipts += [receipt] if queue is None else queue.answer(receipt)
        self._staging.advance()
        self._linking.advance()
        return receipts

    def forget(self, receiver: str) -> None:
        self._staging.forget(receiver)
        self._linking.forget(receiver)
        self._handed.pop(receiver, None)
        for number in [number for number, (name, _) in self._exported.items() if name == receiver]:
            del self._exported[number]

    # Receiving

    def messages(self) -> Iterator[Message]:
        while self.inbox:
            envelope = self.inbox.popleft()
            message = envelope.message
            if isinstance(message, Unreadable):
                self._stage(message)
                continue
            if isinstance(message, Offer) and envelope.access is not None:
                self._access[message.sender, message.number] = envelope.access
                if isinstance(envelope.access, Exported) and envelope.access.handle:
                    self._means.opened.take_handle(message.pool_id, envelope.access)
            yield message

    def _stage(self, message: Unreadable) -> None:
        """Sends an offer again, by a route that the receiver can read."""
        there = self._means.find(_worker_of(message.receiver))
        if there is None:
            return
        if self._unreadable.get(message.receiver) != there.epoch:
            logger.warning(
                "'%s' cannot read the memory of '%s', which is copied for it", message.receiver, self.name
            )
        self._unreadable[message.receiver] = there.epoch
        receiver, offer = self._exported.pop(message.number, ("", None))
        if offer is not None:
            self.offer(receiver, offer)
        elif message.number in self._staging:
            self._linking.repeat(self._staging.withdraw(message.number))

    def recv(self) -> Sequence[Offer[Any]]:
        taken = super().recv()
        # Offers that were not expected have been answered without reading what they offer.
        self._access.clear()
        self._means.opened.forget_gone()
        return taken

    def _take(self, offer: Offer[Any]) -> Offer[Any] | None:
        try:
            return super()._take(offer)
        except HandleError:
            self._post(offer.sender, Unreadable(self.name, offer.number), None)
            return None

    def pool_of(self, offer: Offer[Any]) -> Any:
        access = self._access.get((offer.sender, offer.number))
        # What comes in parts is for all ranks, each of which copies it to its own device.
        device = _CPU if isinstance(self.pool, GroupPools) else self.pool.device
        return self._means.opened.open(offer, access, device)

    def unread_offers(self) -> Iterator[Offer[Any]]:
        """Takes the offers that have come and are not read. Each is taken by one of several threads."""
        with suppress(IndexError):
            while True:
                message = self.inbox.popleft().message
                if isinstance(message, Offer):
                    yield message

    def close(self) -> Sequence[Offer[Any]]:
        """Answers what has been copied. Returns the offers that have been read and will not be copied."""
        while self._deferred:
            self._deferred.flush()
            time.sleep(_COPY_POLL_S)
        if self.segment is not None:
            self._means.gpu_memory.unpin(self.segment.memory)
        return self._offers


def _worker_of(name: str) -> str:
    return name.rpartition(".")[0]
