"""Records transfers at both ends: the holders of cache entries, and their release. No tensors."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from epd.encode.encoder_cache import EncoderCacheManager, GroupKey
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
