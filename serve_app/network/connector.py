"""Moves data between worker processes: offers and receipts are messages, bulk data bypasses them if it can.

`epd.serve_app.network.routes` says which way the data of an offer takes. Where the receiver cannot reach the
pool, the offer travels in parts, through host memory of bounded size.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from epd.serve_app.network.packing import AnyPool, Part, PartQueue, Shipment, pack, parts_of
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
from epd.stages.connectors.gpu_memory import GpuMemory, HandleError
from epd.stages.connectors.mailbox import MailboxConnector, Message
from epd.stages.connectors.nixl import NixlAgent
from epd.stages.ranks.group_pools import GroupPools
from epd.transfer.connectors import Offer, Receipt
from epd.transfer.staging import StagingSpace

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
class Means:
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


class ProcessConnector(MailboxConnector[Any, Any]):
    """Connects one end of a worker. Created by `network.process_transport`."""

    pool: AnyPool

    def __init__(
        self,
        name: str,
        kind: Kind,
        pool: AnyPool,
        pool_id: str,
        means: Means,
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
        self._means.routes[worker_of(receiver)] = route

    def _route(self, receiver: str) -> Route:
        there = self._means.find(worker_of(receiver))
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
        there = self._means.find(worker_of(receiver))
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
        self._means.post(worker_of(name), Envelope(name, self.kind, message, access))

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
        there = self._means.find(worker_of(message.receiver))
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


def worker_of(name: str) -> str:
    return name.rpartition(".")[0]
