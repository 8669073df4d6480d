"""A worker's messages to other workers: sent again until they have come, read in order and once.

An answered call acknowledges what it brought; one that fails, or is not answered, is made again. A worker
that was started again is another one: what its former epoch did not read is of no use to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from epd.transfer.message_channel import IncomingChannel, OutgoingChannel
from serve_app.task_group import Tasks

logger = logging.getLogger(__name__)

_TICK_S = 0.25  # between looks for what is to be sent again
_MAX_EPOCHS = 2  # of one sender that are read from: the last of one may come after the first of the next


class PeerLike(Protocol):
    """Another worker in one epoch."""

    @property
    def epoch(self) -> str: ...


PeerT = TypeVar("PeerT", bound=PeerLike)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message on its way. sender, epoch: who sent it. number: see `epd.transfer.message_channel`."""

    sender: str
    epoch: str
    number: int
    message: Any


@dataclass(slots=True)
class _Link(Generic[PeerT]):
    peer: PeerT
    channel: OutgoingChannel[Any] = field(default_factory=lambda: OutgoingChannel())


class PeerLinks(Generic[PeerT]):
    """Used from one event loop. call: brings a delivery to a worker and returns the acknowledgement.

    That is None from a worker in another epoch. call may raise whatever its transport does.
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
        """From now on these are the other workers, in these epochs."""
        known = {name: link for name, link in self._links.items() if name in peers}
        self._links = {
            name: known[name] if name in known and known[name].peer.epoch == peer.epoch else _Link(peer)
            for name, peer in peers.items()
        }

    # Out

    def send(self, worker: str, message: Any) -> None:
        """For a worker that is gone, or not known yet, there is nobody to read it."""
        link = self._links.get(worker)
        if link is not None:
            link.channel.push(message)
            self._send_due(link)

    async def run(self) -> None:
        """Sends again what was not acknowledged; to be run as long as messages are sent."""
        while True:
            await asyncio.sleep(_TICK_S)
            for link in list(self._links.values()):
                self._send_due(link)

    async def close(self) -> None:
        self._tasks.cancel()
        await self._tasks.wait()

    def num_unread(self) -> int:
        """Messages that are not acknowledged."""
        return sum(len(link.channel) for link in self._links.values())

    def _send_due(self, link: _Link[PeerT]) -> None:
        for number, message in link.channel.due(asyncio.get_running_loop().time()):
            self._tasks.spawn(self._deliver(link, Delivery(self._name, self._epoch, number, message)))

    async def _deliver(self, link: _Link[PeerT], delivery: Delivery) -> None:
        try:
            next_number = await self._call(link.peer, delivery)
        except Exception:  # the transport's: it is made again when it is due
            logger.warning("message %d was not delivered", delivery.number, exc_info=True)
            return
        if next_number is None:
            return
        link.channel.acknowledge(next_number)
        self._send_due(link)

    # In

    def take(self, delivery: Delivery) -> tuple[list[Any], int]:
        """The messages that can be read now, and the acknowledgement."""
        epochs = self._incoming.setdefault(delivery.sender, {})
        channel = epochs.setdefault(delivery.epoch, IncomingChannel())
        while len(epochs) > _MAX_EPOCHS:
            del epochs[next(iter(epochs))]
        return channel.take(delivery.number, delivery.message), channel.next
