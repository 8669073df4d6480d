"""Sends a worker's messages to other workers: resent until they arrive, read in order and once.

An answered call acknowledges its messages; one that fails, or is not answered, is repeated. A restarted
worker counts as another one: messages that its former epoch did not read are useless to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from epd.serve_app.task_group import Tasks
from epd.transfer.message_channel import IncomingChannel, OutgoingChannel

logger = logging.getLogger(__name__)

_TICK_S = 0.25  # between checks for messages to resend
_MAX_EPOCHS = 2  # of one sender that are read: the last message of one may come after the first of the next


class PeerLike(Protocol):
    """Identifies another worker in one epoch."""

    @property
    def epoch(self) -> str: ...


PeerT = TypeVar("PeerT", bound=PeerLike)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message in transit. sender, epoch: its sender. number: see `epd.transfer.message_channel`."""

    sender: str
    epoch: str
    number: int
    message: Any


@dataclass(slots=True)
class _Link(Generic[PeerT]):
    peer: PeerT
    channel: OutgoingChannel[Any] = field(default_factory=lambda: OutgoingChannel())


class PeerLinks(Generic[PeerT]):
    """Links a worker to its peers. Used from one event loop.

    call: brings a delivery to a worker and returns the acknowledgement, None from a worker in another epoch;
    may raise any error of its transport
    """

    def __init__(
        self, name: str, epoch: str, call: Callable[[PeerT, Delivery], Awaitable[int | None]]
    ) -> None:
        self._name = name
        self._epoch = epoch
        self._call = call
        self._links: dict[str, _Link[PeerT]] = {}
        self._incoming: dict[str, dict[str, IncomingChannel[Any]]] = {}  # by sender and its epoch
        self._tasks = Tasks()

    def meet(self, peers: Mapping[str, PeerT]) -> None:
        """Replaces the other workers, with their epochs."""
        known = {name: link for name, link in self._links.items() if name in peers}
        self._links = {
            name: known[name] if name in known and known[name].peer.epoch == peer.epoch else _Link(peer)
            for name, peer in peers.items()
        }

    # Outgoing

    def send(self, worker: str, message: Any) -> None:
        """Sends a message; drops it if the worker is gone or not known yet."""
        link = self._links.get(worker)
        if link is not None:
            link.channel.push(message)
            self._send_due(link)

    async def run(self) -> None:
        """Resends what was not acknowledged; to be run as long as messages are sent."""
        while True:
            await asyncio.sleep(_TICK_S)
            for link in list(self._links.values()):
                self._send_due(link)

    async def close(self) -> None:
        self._tasks.cancel()
        await self._tasks.wait()

    def num_unread(self) -> int:
        """Returns the number of messages that are not acknowledged."""
        return sum(len(link.channel) for link in self._links.values())

    def _send_due(self, link: _Link[PeerT]) -> None:
        for number, message in link.channel.due(asyncio.get_running_loop().time()):
            self._tasks.spawn(self._deliver(link, Delivery(self._name, self._epoch, number, message)))

    async def _deliver(self, link: _Link[PeerT], delivery: Delivery) -> None:
        try:
            next_number = await self._call(link.peer, delivery)
        except Exception as error:  # noqa: BLE001 - of the transport: the call is repeated when due
            logger.warning("message %d was not delivered: %s", delivery.number, error)
            return
        if next_number is None:
            return
        link.channel.acknowledge(next_number)
        self._send_due(link)

    # Incoming

    def take(self, delivery: Delivery) -> tuple[list[Any], int]:
        """Takes a delivery. Returns the messages that can be read now, and the acknowledgement."""
        epochs = self._incoming.setdefault(delivery.sender, {})
        channel = epochs.setdefault(delivery.epoch, IncomingChannel())
        while len(epochs) > _MAX_EPOCHS:
            del epochs[next(iter(epochs))]
        return channel.take(delivery.number, delivery.message), channel.next
