"""Sends offers in parts through a bounded space: each part waits for room, and a receipt gives its room back.

    add: parts of an offer  ->  queue of its receiver  ->  ship: there is room
                                                       <-  answer: a receipt; the last one ends the offer

Receivers take turns, and none may have more than half of the space: one that hangs stops no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from epd.serve_app.network.packing import Part
from epd.transfer.connectors import Offer, Receipt, TransferOutcome
from epd.transfer.staging import StagingSpace


@dataclass(slots=True)
class _Whole:
    """An offer that travels in parts. num_open: parts without a receipt. end: of the first that failed."""

    offer: Offer[Any]
    receiver: str
    num_open: int
    end: Receipt | None = None


@dataclass(frozen=True, slots=True)
class Shipment:
    """A part for which there is room. number: of its own offer. offset: of the room, in bytes."""

    whole: _Whole
    part: Part
    number: int
    offset: int = 0

    @property
    def receiver(self) -> str:
        return self.whole.receiver

    @property
    def offer(self) -> Offer[Any]:
        """Returns the part's own offer."""
        whole = self.whole.offer
        return Offer(whole.transfer_id, self.number, whole.sender, whole.pool_id, self.part.source)


class PartQueue:
    """Holds what waits for room, and what is without a receipt."""

    def __init__(self, space: StagingSpace, numbers: Iterator[int], ship: Callable[[Shipment], None]) -> None:
        """Begins empty.

        numbers: of the offers to come
        ship: copies the part and posts its offer; called as soon as there is room
        """
        self._space = space
        self._numbers = numbers
        self._ship = ship
        self._waiting: dict[str, deque[tuple[_Whole, Part]]] = {}  # by receiver
        self._shipped: dict[int, Shipment] = {}  # by number

    def __len__(self) -> int:
        """Returns how many parts wait or are without a receipt."""
        return len(self._shipped) + sum(map(len, self._waiting.values()))

    def __contains__(self, number: int) -> bool:
        return number in self._shipped

    def fits(self, parts: Sequence[Part]) -> bool:
        """Returns whether the space is large enough for each of these parts."""
        return all(part.num_bytes <= self._space.max_bytes for part in parts)

    def add(self, receiver: str, offer: Offer[Any], parts: Sequence[Part]) -> None:
        """Sends an offer in these parts. Raises ValueError for one that never fits."""
        if not self.fits(parts):
            raise ValueError(
                f"a part of {max(part.num_bytes for part in parts)} bytes is larger than the space"
            )
        whole = _Whole(offer, receiver, len(parts))
        self._waiting.setdefault(receiver, deque()).extend((whole, part) for part in parts)
        self.advance()

    def advance(self) -> None:
        """Ships what there is room for, a part of each receiver in turn."""
        while sum(self._advance(receiver) for receiver in list(self._waiting)):
            pass

    def _advance(self, receiver: str) -> bool:
        queue = self._waiting[receiver]
        whole, part = queue[0]
        offset = self._space.take(receiver, part.num_bytes)
        if offset is None:
            return False
        queue.popleft()
        if not queue:
            del self._waiting[receiver]
        shipment = Shipment(whole, part, next(self._numbers), offset)
        self._shipped[shipment.number] = shipment
        self._ship(shipment)
        return True

    def answer(self, receipt: Receipt) -> list[Receipt]:
        """Takes the receipt of a part. Returns the receipt of its offer if no part of that is left."""
        shipment = self._shipped.pop(receipt.number)
        self._space.free(shipment.offset)
        whole = shipment.whole
        whole.num_open -= 1
        if receipt.outcome is not TransferOutcome.DELIVERED and whole.end is None:
            whole.end = receipt
            self._drop_waiting(whole)
        if whole.num_open:
            return []
        outcome, error = TransferOutcome.DELIVERED, ""
        if whole.end is not None:
            outcome, error = whole.end.outcome, whole.end.error
        return [Receipt(whole.offer.transfer_id, whole.offer.number, outcome, error)]

    def _drop_waiting(self, whole: _Whole) -> None:
        """Drops the parts of an offer that nobody wants any more."""
        queue = self._waiting.pop(whole.receiver, deque())
        kept = deque((each, part) for each, part in queue if each is not whole)
        whole.num_open -= len(queue) - len(kept)
        if kept:
            self._waiting[whole.receiver] = kept

    def forget(self, receiver: str) -> None:
        """Drops all parts for a receiver that is gone, which gives no receipts."""
        self._waiting.pop(receiver, None)
        for number in [n for n, shipment in self._shipped.items() if shipment.receiver == receiver]:
            self._space.free(self._shipped.pop(number).offset)
        self.advance()
