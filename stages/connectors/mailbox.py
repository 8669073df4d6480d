"""The one `EncoderConnector` there is to write: mailboxes carry messages, and `recv` copies between pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from epd.connectors import Offer, Receipt, Ticket, TransferOutcome
from epd.encoder_cache import CachedGroup
from stages.encoder_pool import EncoderPool

Message = Offer | Receipt


class MailboxConnector(ABC):
    """One worker's end; a transport says how a message is put and got, and how a sender's pool is reached."""

    def __init__(self, name: str, pool: EncoderPool) -> None:
        self.name = name
        self.pool = pool
        self._expected: dict[str, Ticket] = {}
        self._offers: list[Offer] = []
        self._receipts: list[Receipt] = []

    @abstractmethod
    def put(self, name: str, message: Message) -> None:
        """Leaves a message for the worker `name`; a worker that is gone never reads it."""

    @abstractmethod
    def messages(self) -> Iterator[Message]:
        """Takes the messages that have come for this worker."""

    @abstractmethod
    def pool_of(self, offer: Offer) -> EncoderPool | None:
        """The sender's pool, to read from; None when the sender is gone."""

    def send(self, ticket: Ticket, source: CachedGroup | None, error: str = "") -> None:
        self.put(ticket.receiver, Offer(ticket, self.name, source, error))

    def poll(self) -> Sequence[Receipt]:
        self._sort()
        receipts, self._receipts = self._receipts, []
        return receipts

    def expect(self, ticket: Ticket) -> None:
        self._expected[ticket.transfer_id] = ticket

    def cancel(self, transfer_id: str) -> None:
        self._expected.pop(transfer_id, None)

    def recv(self) -> Sequence[Receipt]:
        self._sort()
        offers, self._offers = self._offers, []
        ends = [self._accept(offer) for offer in offers]
        return [end for end in ends if end.outcome is not TransferOutcome.CANCELLED]

    def _accept(self, offer: Offer) -> Receipt:
        """Copies an offer that is expected; answers the sender in every case."""
        ticket = self._expected.pop(offer.ticket.transfer_id, None)
        if ticket is None:
            end = Receipt(offer.ticket.transfer_id, TransferOutcome.CANCELLED)
        else:
            end = self._copied(ticket, offer)
        self.put(offer.sender, end)
        return end

    def _copied(self, ticket: Ticket, offer: Offer) -> Receipt:
        if offer.source is None:
            return Receipt(ticket.transfer_id, TransferOutcome.FAILED, offer.error)
        source_pool = self.pool_of(offer)
        if source_pool is None:
            return Receipt(ticket.transfer_id, TransferOutcome.FAILED, f"encoder '{offer.sender}' is gone")
        self.pool.copy(source_pool, offer.source, ticket.target)
        return Receipt(ticket.transfer_id, TransferOutcome.DELIVERED)

    def _sort(self) -> None:
        for message in self.messages():
            if isinstance(message, Offer):
                self._offers.append(message)
            else:
                self._receipts.append(message)
