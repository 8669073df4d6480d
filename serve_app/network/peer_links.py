"""Sends a worker's messages to other workers: resent until they arrive, read in order and once.

    push  ->  due: number, message  -- may be lost -->  take  ->  messages in order, each once
              kept until acknowledged  <-- may be lost --  next: all numbers below have been taken

A channel connects one epoch of a worker with one epoch of another. Time is passed in, seconds on any one
clock. An answered call acknowledges its messages; one that fails, or is not answered, is repeated. A
restarted worker counts as another one: messages that its former epoch did not read are useless to it.

To a worker that it has not met, a worker can send nothing yet:

board --views--> fronts     a front may have seen a newer view than the worker that it sends a message to:
      --views--> workers    the message waits until the worker has met the one that it names
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from epd.control.recent import Recent
from epd.serve_app.messages import Message
from epd.serve_app.task_group import Tasks
from epd.serve_app.worker.peer_losses import named_peer

_MAX_MET = 1024
T = TypeVar("T")
logger = logging.getLogger(__name__)

_TICK_S = 0.25  # between checks for messages to resend
_MAX_EPOCHS = 2  # of one sender that are read: the last message of one may come after the first of the next


@dataclass(slots=True)
class _Kept(Generic[T]):
    """Holds a message that is not acknowledged, sent next at due_s, and again after pause_s."""

    message: T
    pause_s: float
    due_s: float = float("-inf")


class OutgoingChannel(Generic[T]):
    """Sends messages. They are numbered from 0, without gaps."""

    def __init__(self, *, max_in_flight: int = 64, resend_s: float = 1.0, max_resend_s: float = 8.0) -> None:
        """Begins empty.

        max_in_flight: messages that are sent before the first of them is acknowledged.
        resend_s: until one is sent again, twice as long each time, up to max_resend_s.
        """
        self._max_in_flight = max_in_flight
        self._resend_s = resend_s
        self._max_resend_s = max_resend_s
        self._kept: dict[int, _Kept[T]] = {}  # in order of their numbers
        self._num_pushed = 0

    def __len__(self) -> int:
        """Returns how many messages are not acknowledged."""
        return len(self._kept)

    def push(self, message: T) -> None:
        """Takes a message to be sent."""
        self._kept[self._num_pushed] = _Kept(message, min(self._resend_s, self._max_resend_s))
        self._num_pushed += 1

    def due(self, now_s: float) -> list[tuple[int, T]]:
        """Returns the messages to be sent now, with their numbers; they count as sent."""
        return list(self._due(now_s))

    def _due(self, now_s: float) -> Iterator[tuple[int, T]]:
        for position, (number, kept) in enumerate(self._kept.items()):
            if position >= self._max_in_flight:
                return
            if kept.due_s <= now_s:
                kept.due_s = now_s + kept.pause_s
                kept.pause_s = min(2 * kept.pause_s, self._max_resend_s)
                yield number, kept.message

    def acknowledge(self, next_number: int) -> None:
        """Drops all numbers below, which the receiver has taken. Late or repeated calls are ignored."""
        for number in [number for number in self._kept if number < next_number]:
            del self._kept[number]


class IncomingChannel(Generic[T]):
    """Receives messages. next: the acknowledgement, all numbers below have been taken."""

    def __init__(self, *, max_early: int = 64) -> None:
        """Begins empty. max_early: messages that are kept until those before them have come."""
        self.next = 0
        self._max_early = max_early
        self._early: dict[int, T] = {}

    def take(self, number: int, message: T) -> list[T]:
        """Returns the messages that can be read now, in order; early and repeated ones give none."""
        if self.next <= number < self.next + self._max_early:
            self._early.setdefault(number, message)
        taken = []
        while self.next in self._early:
            taken.append(self._early.pop(self.next))
            self.next += 1
        return taken


class MetWorker(Protocol):
    """Names a worker in one epoch. incarnation: of the name, from 1."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def epoch(self) -> str: ...


PeerT = TypeVar("PeerT", bound=MetWorker)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message in transit. sender, epoch: its sender. number: see `epd.serve_app.network.peer_links`."""

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


class KnownPeers:
    """Remembers those that views have shown, also after their loss. Used from one event loop."""

    def __init__(self, patience_s: float) -> None:
        """Begins with none.

        patience_s: the longest that a message waits; a worker whose views are later than that is lost itself
        """
        self._epochs: Recent[str, bool] = Recent(_MAX_MET)
        self._incarnations: dict[str, int] = {}  # the latest, by name
        self._patience_s = patience_s
        self._changed = asyncio.Event()

    def meet(self, workers: Iterable[MetWorker]) -> None:
        """Notes the workers of a view, and this one itself."""
        for worker in workers:
            self._epochs.set(worker.epoch, True)
            latest = self._incarnations.get(worker.name, 0)
            self._incarnations[worker.name] = max(latest, worker.incarnation)
        self._changed.set()
        self._changed = asyncio.Event()

    def knows(self, epoch: str) -> bool:
        """Returns whether a worker in this epoch has been in a view."""
        return self._epochs.get(epoch) is not None

    def is_ready_for(self, message: Message[Any]) -> bool:
        """Returns whether the worker that a message names has been met, or a later one of its name."""
        named = named_peer(message)
        return named is None or named.incarnation <= self._incarnations.get(named.name, 0)

    async def wait_for(self, message: Message[Any]) -> None:
        """Returns when the worker that a message names has been met, or would have been if it were there."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                while not self.is_ready_for(message):
                    await self._changed.wait()
