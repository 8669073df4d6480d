"""Records transfers at both ends: the holders of cache entries, and their release. No tensors.

A receiver grants room in order; groups are ready in any order and taken in order:

    groups of a request   |  0    1    2    3    4    5  |
                          [released)[ taken  )[granted    )      half-open, each pointer only moves right
    held references                  [       references    )

Room is granted first come, first served over all requests: the oldest gets all its groups before a younger
one gets its next, so a request that has begun can always end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epd.encode.encoder_cache import CachedGroup, EncoderCacheManager, GroupKey, GroupSpec
from epd.transfer.connectors import Receipt, Ticket, TransferOutcome


class TransferIds:
    """Names one receiver's transfers; a receiver that restarts under its old name repeats no name."""

    def __init__(self, receiver: str) -> None:
        self._prefix = f"{receiver}#{secrets.token_hex(4)}"
        self._num_issued = 0

    def next(self) -> str:
        self._num_issued += 1
        return f"{self._prefix}-{self._num_issued}"

    @staticmethod
    def receiver_of(transfer_id: str) -> str:
        """Returns what the names of a receiver's transfers begin with, and no other's of its name."""
        return transfer_id.rpartition("-")[0]


class Outbox:
    """Tracks a sender's offers, which must stay until the receipt: each transfer holds its entry."""

    def __init__(self, cache: EncoderCacheManager) -> None:
        self._cache = cache
        self._open: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, ticket: Ticket) -> None:
        """Holds the ticket's entry until `close`. Raises KeyError if it is not cached."""
        self._cache.acquire(ticket.key, _sending(ticket.transfer_id))
        self._open[ticket.transfer_id] = ticket

    def close(self, receipts: Iterable[Receipt]) -> None:
        """Releases what has arrived, was not wanted, or failed. Receipts for anything else are ignored."""
        for receipt in receipts:
            ticket = self._open.pop(receipt.transfer_id, None)
            if ticket is not None:
                self._cache.release(ticket.key, _sending(receipt.transfer_id))

    def drop_receiver(self, receiver: str) -> None:
        """Releases everything for a receiver that is gone and will not send receipts."""
        self.close(
            Receipt(transfer_id, 0, TransferOutcome.CANCELLED)
            for transfer_id in [i for i, ticket in self._open.items() if ticket.receiver == receiver]
        )

    def check_integrity(self) -> None:
        for transfer_id, ticket in self._open.items():
            if _sending(transfer_id) not in self._cache.holders(ticket.key):
                raise AssertionError(f"transfer '{transfer_id}' does not hold its entry")
            if not self._cache.is_ready(ticket.key):
                raise AssertionError(f"transfer '{transfer_id}' offers an entry that is not ready")


class Inbox:
    """Tracks tickets that a receiver has issued; each is the writer, hence a holder, of its pending entry."""

    def __init__(self, cache: EncoderCacheManager, receiver: str) -> None:
        self._cache = cache
        self._receiver = receiver
        self._open: dict[GroupKey, Ticket] = {}
        self._ids = TransferIds(receiver)

    def issue(self, key: GroupKey, num_embeddings: int) -> Ticket:
        """Reserves room. Raises ValueError without room: see `EncoderCacheManager.can_reserve`."""
        transfer_id = self._ids.next()
        target = self._cache.reserve(key, num_embeddings, transfer_id)
        self._open[key] = Ticket(transfer_id, self._receiver, key, target)
        return self._open[key]

    def reissue(self, key: GroupKey) -> tuple[Ticket, Ticket]:
        """Replaces a ticket by one for the same blocks, for another sender to fill; the old one is closed.

        Returns the old and the new one. Raises KeyError when no ticket is open for the key.
        """
        old = self._open[key]
        new = Ticket(self._ids.next(), self._receiver, key, old.target)
        self._cache.acquire(key, new.transfer_id)
        self._cache.release(key, old.transfer_id)
        self._open[key] = new
        return old, new

    def unwanted(self, key: GroupKey) -> Ticket | None:
        """Returns the open ticket for the key, if only the ticket itself still holds the entry."""
        ticket = self._open.get(key)
        if ticket and self._cache.holders(key) == {ticket.transfer_id}:
            return ticket
        return None

    def deliver(self, ticket: Ticket, places: tuple[int, ...] = ()) -> None:
        """Records that the ticket's blocks have been written. places: see `CachedGroup`."""
        self._cache.commit(ticket.key, places)
        self.withdraw(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Closes a ticket whose blocks will not be written."""
        del self._open[ticket.key]
        self._cache.release(ticket.key, ticket.transfer_id)

    def find(self, transfer_id: str) -> Ticket | None:
        """Returns the open ticket with this id."""
        return next((ticket for ticket in self._open.values() if ticket.transfer_id == transfer_id), None)

    def check_integrity(self) -> None:
        for key, ticket in self._open.items():
            if self._cache.is_ready(key) or ticket.transfer_id not in self._cache.holders(key):
                raise AssertionError(f"open ticket '{ticket.transfer_id}' without a pending entry of its own")


def _sending(transfer_id: str) -> str:
    return f"sending {transfer_id}"


@dataclass(frozen=True, slots=True)
class Grant:
    """Grants room to group number `group` of a request, which must be encoded, with its encoder's ticket."""

    request_id: str
    group: int
    ticket: Ticket


@dataclass(slots=True)
class _ReceivedRequest:
    groups: tuple[GroupSpec, ...]
    released: int = 0
    taken: int = 0
    granted: int = 0


class Reception:
    """Tracks the groups that one worker waits for. Its cache and its tickets are changed through it alone."""

    def __init__(self, cache: EncoderCacheManager, inbox: Inbox) -> None:
        self.cache = cache
        self.inbox = inbox
        self._requests: dict[str, _ReceivedRequest] = {}

    def open(self, request_id: str, groups: Sequence[GroupSpec]) -> None:
        """Starts waiting for the groups of a request, in order.

        Raises InfeasibleError when a group would never fit, ValueError for an id in use.
        """
        if request_id in self._requests:
            raise ValueError(f"request '{request_id}' is open already")
        for group in groups:
            self.cache.check_fits(group.num_embeddings)
        self._requests[request_id] = _ReceivedRequest(tuple(groups))

    def grant(self) -> list[Grant]:
        """Holds cached and arriving groups; issues tickets for the rest while there is room."""
        grants: list[Grant] = []
        for request_id, waiting in self._requests.items():
            while waiting.granted < len(waiting.groups):
                spec = waiting.groups[waiting.granted]
                if spec.key not in self.cache:
                    if not self.cache.can_reserve(spec.num_embeddings):
                        return grants
                    ticket = self.inbox.issue(spec.key, spec.num_embeddings)
                    grants.append(Grant(request_id, waiting.granted, ticket))
                self.cache.acquire(spec.key, _holder(request_id, waiting.granted))
                waiting.granted += 1
        return grants

    def take(self, request_id: str) -> list[tuple[int, CachedGroup]]:
        """Returns the groups that have become readable, in order and without gaps, each once."""
        waiting = self._requests[request_id]
        taken = []
        while waiting.taken < waiting.granted:
            key = waiting.groups[waiting.taken].key
            if not self.cache.is_ready(key):
                break
            taken.append((waiting.taken, self.cache.get(key)))
            waiting.taken += 1
        return taken

    def release(self, request_id: str, stop: int) -> None:
        """Releases groups [.., stop), which must have been taken: they have been prefilled."""
        waiting = self._requests[request_id]
        if stop > waiting.taken:
            raise ValueError(
                f"cannot release {stop} groups of '{request_id}', only {waiting.taken} are taken"
            )
        self._let_go(request_id, waiting, stop)

    def close(self, request_id: str) -> list[Ticket]:
        """Forgets a finished or cancelled request; withdraws and returns tickets that no other one wants."""
        waiting = self._requests.pop(request_id)
        self._let_go(request_id, waiting, waiting.granted)
        tickets = [self.inbox.unwanted(spec.key) for spec in waiting.groups[: waiting.granted]]
        unwanted = {ticket.transfer_id: ticket for ticket in tickets if ticket}
        for ticket in unwanted.values():
            self.inbox.withdraw(ticket)
        return list(unwanted.values())

    def waiting_for(self, key: GroupKey) -> list[str]:
        """Returns the requests that have been granted this group and not taken it."""
        return [
            request_id
            for request_id, waiting in self._requests.items()
            if any(spec.key == key for spec in waiting.groups[waiting.taken : waiting.granted])
        ]

    def _let_go(self, request_id: str, waiting: _ReceivedRequest, stop: int) -> None:
        for group in range(waiting.released, stop):
            self.cache.release(waiting.groups[group].key, _holder(request_id, group))
        waiting.released = max(waiting.released, stop)

    def check_integrity(self) -> None:
        """Raises AssertionError unless pointers are in order and exactly the granted groups are held."""
        self.cache.check_integrity()
        self.inbox.check_integrity()
        for request_id, waiting in self._requests.items():
            if not waiting.released <= waiting.taken <= waiting.granted <= len(waiting.groups):
                raise AssertionError(f"pointers of '{request_id}' out of order: {waiting}")
            for group, spec in enumerate(waiting.groups):
                held = _holder(request_id, group) in self.cache.holders(spec.key)
                if held != (waiting.released <= group < waiting.granted):
                    raise AssertionError(f"group {group} of '{request_id}' held: {held}")


def _holder(request_id: str, group: int) -> str:
    return f"{request_id}/{group}"
