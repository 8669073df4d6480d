"""How embeddings get from an encode worker into blocks that a prefill worker has reserved.

    receiver                      sender
    reserve blocks, Ticket  --->  encode, hold the result
                            <---  Offer: where the embeddings are
    copy into the blocks
    commit                  --->  Receipt: let go of the result

The receiver copies, and only for tickets that are still open: a late offer can never write into blocks that
have since been given to another. The sender keeps its copy until the receipt, whatever that says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from epd.encoder_cache import CachedGroup, GroupKey


class TransferOutcome(StrEnum):
    """How a transfer ended, as both sides are told."""

    DELIVERED = "delivered"
    CANCELLED = "cancelled"  # the receiver did not want it any more
    FAILED = "failed"  # the sender could not produce it


@dataclass(frozen=True, slots=True)
class Ticket:
    """Room for one group at a receiver, and the name of the transfer that will fill it."""

    transfer_id: str
    receiver: str
    key: GroupKey
    target: CachedGroup


@dataclass(frozen=True, slots=True)
class Offer:
    """Embeddings for a ticket: in `source` at the sender, or None when they could not be made."""

    ticket: Ticket
    sender: str
    source: CachedGroup | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The end of a transfer."""

    transfer_id: str
    outcome: TransferOutcome
    error: str = ""


class EncoderConnector(Protocol):
    """One worker's end. Nothing blocks: `send` returns at once, copying is done by the receiver's `recv`."""

    name: str

    def send(self, ticket: Ticket, source: CachedGroup | None, error: str = "") -> None:
        """Offers what this worker's pool holds at `source`, which must stay until the receipt.

        None instead of a source tells the receiver that there will be nothing, and why.
        """
        ...

    def poll(self) -> Sequence[Receipt]:
        """Receipts for what this end has sent, new since the last call."""
        ...

    def expect(self, ticket: Ticket) -> None:
        """Opens a ticket: from now on an offer for it is copied into its blocks."""
        ...

    def cancel(self, transfer_id: str) -> None:
        """Closes a ticket: from now on nothing is written into its blocks. Unknown ids are ignored."""
        ...

    def recv(self) -> Sequence[Receipt]:
        """Copies all offers for open tickets and answers the rest; the ends of this end's own tickets."""
        ...
