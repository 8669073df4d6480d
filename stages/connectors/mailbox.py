"""Implements the common connector: mailboxes carry messages, `recv` copies between pools.

What is sent is up to the pool: `EncoderPool` takes embeddings, `KVPools` takes keys and values. A GPU writes
and copies later than it is asked to, so both messages about its memory wait for it:

    offer      is put when the kernels that write what it offers are done
    receipt    is put when the copy is done: only then may the sender reuse the memory
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Generic, Protocol, Self, TypeVar

import torch

from epd.transfer.connectors import AnyTicket, Offer, Receipt, SourceT, TicketT, TransferOutcome

Message = Offer[Any] | Receipt

_TicketT = TypeVar("_TicketT", bound=AnyTicket, contravariant=True)
_SourceT = TypeVar("_SourceT", contravariant=True)


class Deferred:
    """Makes calls in the order in which they were added, each once everything queued before it is done.

    On a CPU, all is done when a call returns: nothing is ever delayed.
    """

    def __init__(self, device: torch.device) -> None:
        """Begins empty. device: that the work is queued on, in its current stream."""
        self._device = device
        self._calls: deque[tuple[QueuedWork, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Callable[[], None]) -> None:
        """Adds a call about what has been queued on the device so far, and makes those that are due."""
        self._calls.append((recorded(self._device), call))
        self.flush()

    def flush(self) -> None:
        """Makes the calls that are due."""
        while self._calls and self._calls[0][0].is_done():
            self._calls.popleft()[1]()


class QueuedWork(Protocol):
    """Stands for everything that was queued before it."""

    def is_done(self) -> bool:
        """Reports whether all of that has been computed and written. Never waits."""
        ...


@dataclass(frozen=True, slots=True)
class _Done:
    """Stands for work of a CPU, which is done when the call returns."""

    def is_done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _EventCompletion:
    """Stands for the work before a CUDA event."""

    event: torch.cuda.Event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


DONE: QueuedWork = _Done()


def recorded(device: torch.device) -> QueuedWork:
    """Returns the completion of everything queued so far on the device's current stream; of a CPU, `DONE`."""
    if device.type == "cpu":
        return DONE
    return _EventCompletion(torch.cuda.current_stream(device).record_event())


class SourceLostError(Exception):
    """Raised for a sender's pool that is found gone while it is read."""


class Pool(Protocol[_TicketT, _SourceT]):
    """Holds memory that can be filled from another of its kind."""

    @property
    def device(self) -> torch.device:
        """Returns where the memory is."""
        ...

    def publish(self, ticket: _TicketT) -> None:
        """Lets the ticket's receiver read what is written so far, once the device has done what is queued."""
        ...

    def receive(self, ticket: _TicketT, source: _SourceT, source_pool: Self) -> None:
        """Copies what lies at `source` in the other pool to where the ticket says.

        Raises ValueError for what does not fit there; then nothing has been written. Raises SourceLostError.
        """
        ...


class MailboxConnector(ABC, Generic[TicketT, SourceT]):
    """Connects one worker; a transport defines put and get of messages, and access to a sender's pool."""

    def __init__(self, name: str, pool: Pool[TicketT, SourceT], pool_id: str) -> None:
        self.name = name
        self.pool = pool
        self.pool_id = pool_id
        self.numbers = count(1)  # of offers
        self._expected: dict[str, tuple[TicketT, set[int]]] = {}  # by transfer, with the offers answered
        self._offers: list[Offer[SourceT]] = []
        self._receipts: list[Receipt] = []
        self._deferred = Deferred(pool.device)

    @abstractmethod
    def put(self, name: str, message: Message) -> None:
        """Leaves a message for the worker `name`; a worker that is gone never reads it."""

    @abstractmethod
    def messages(self) -> Iterator[Message]:
        """Takes the messages that have come for this worker."""

    @abstractmethod
    def pool_of(self, offer: Offer[SourceT]) -> Pool[TicketT, SourceT] | None:
        """Returns the pool that the offer refers to, to read from; None when it is gone."""

    def send(self, ticket: TicketT, source: SourceT | None, error: str = "") -> int:
        if source is not None:
            self.pool.publish(ticket)
        offer = Offer(ticket.transfer_id, next(self.numbers), self.name, self.pool_id, source, error)
        self.offer(ticket.receiver, offer)
        return offer.number

    def offer(self, receiver: str, offer: Offer[SourceT]) -> None:
        """Leaves an offer for the receiver, once what it offers has been written."""
        self._deferred.add(partial(self.put, receiver, offer))

    def forget(self, receiver: str) -> None:
        """Does nothing: a connector that keeps what is on its way to receivers frees it here."""

    def poll(self) -> Sequence[Receipt]:
        self._sort()
        receipts, self._receipts = self._receipts, []
        return receipts

    def expect(self, ticket: TicketT) -> None:
        self._expected[ticket.transfer_id] = ticket, set()

    def cancel(self, transfer_id: str) -> None:
        self._expected.pop(transfer_id, None)

    def recv(self) -> Sequence[Offer[SourceT]]:
        self._sort()
        offers, self._offers = self._offers, []
        return [taken for offer in offers if (taken := self._take(offer)) is not None]

    def _take(self, offer: Offer[SourceT]) -> Offer[SourceT] | None:
        """Copies an offer that is expected; answers the sender, unless that has been done."""
        if offer.transfer_id not in self._expected:
            self._answer(offer, TransferOutcome.CANCELLED)
            return None
        ticket, answered = self._expected[offer.transfer_id]
        if offer.number in answered:  # the sender may have let go of it by now
            return None
        answered.add(offer.number)
        taken = self._copied(ticket, offer)
        self._answer(taken, TransferOutcome.FAILED if taken.source is None else TransferOutcome.DELIVERED)
        return taken

    def _answer(self, offer: Offer[SourceT], outcome: TransferOutcome) -> None:
        """Answers an offer, once the copies made so far are done: its memory is not read any more."""
        receipt = Receipt(offer.transfer_id, offer.number, outcome, offer.error)
        self._deferred.add(partial(self.put, offer.sender, receipt))

    def _copied(self, ticket: TicketT, offer: Offer[SourceT]) -> Offer[SourceT]:
        """Returns the offer after it was copied; without a source if it could not be."""
        if offer.source is None:
            return offer
        try:
            source_pool = self.pool_of(offer)
            if source_pool is None:
                raise SourceLostError
            self.pool.receive(ticket, offer.source, source_pool)
        except SourceLostError:
            return replace(offer, source=None, error=f"sender '{offer.sender}' is gone", is_lost=True)
        except ValueError as error:
            return replace(offer, source=None, error=str(error))
        return offer

    def _sort(self) -> None:
        self._deferred.flush()
        for message in self.messages():
            if isinstance(message, Offer):
                self._offers.append(message)
            else:
                self._receipts.append(message)


class InProcessHub:
    """Registers the workers of this process by name: mailboxes are queues, and pools are reached directly.

    One that takes embeddings and KV has a hub for each.
    """

    def __init__(self) -> None:
        self._ends: dict[str, InProcessConnector[Any, Any]] = {}
        self._num_connected = 0

    def connect(
        self, name: str, pool: Pool[TicketT, SourceT], on_message: Callable[[], None] | None = None
    ) -> InProcessConnector[TicketT, SourceT]:
        """Creates a worker's end, which replaces a worker of the same name.

        on_message: called by the sender of each message, for workers in threads that sleep.
        """
        self._num_connected += 1
        end = InProcessConnector(name, pool, f"{name} {self._num_connected}", self, on_message)
        self._ends[name] = end
        return end

    def disconnect(self, name: str) -> None:
        """Removes the worker with its messages and its pool. Unknown names are ignored."""
        self._ends.pop(name, None)

    def find(self, name: str) -> InProcessConnector[Any, Any] | None:
        return self._ends.get(name)


class InProcessConnector(MailboxConnector[TicketT, SourceT]):
    """Connects one worker; created by `InProcessHub.connect`."""

    def __init__(
        self,
        name: str,
        pool: Pool[TicketT, SourceT],
        pool_id: str,
        hub: InProcessHub,
        on_message: Callable[[], None] | None,
    ) -> None:
        super().__init__(name, pool, pool_id)
        self.inbox: deque[Message] = deque()
        self.on_message = on_message
        self.receivers: set[str] = set()  # that anything was offered to
        self._hub = hub

    def offer(self, receiver: str, offer: Offer[SourceT]) -> None:
        self.receivers.add(receiver)
        super().offer(receiver, offer)

    def put(self, name: str, message: Message) -> None:
        end = self._hub.find(name)
        if end is not None:
            end.inbox.append(message)
            if end.on_message is not None:
                end.on_message()

    def messages(self) -> Iterator[Message]:
        while self.inbox:
            yield self.inbox.popleft()

    def pool_of(self, offer: Offer[SourceT]) -> Pool[TicketT, SourceT] | None:
        end = self._hub.find(offer.sender)
        return end.pool if end is not None and end.pool_id == offer.pool_id else None
