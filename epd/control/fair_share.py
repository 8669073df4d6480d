"""Shares slots fairly among owners: each has a limit, and the owner with the fewest is next, in turn.

slots  [ a ][ a ][ b ]        waiting   a: 5 more   b: 1   c: 2        next: c, which has none
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)
TicketT = TypeVar("TicketT", bound=Hashable)


class FairShare(Generic[OwnerT, TicketT]):
    """Queues tickets of owners for slots; owners take turns, those with the fewest slots first."""

    def __init__(self, num_slots: int, max_per_owner: int) -> None:
        self._num_free = num_slots
        self._max_per_owner = max_per_owner
        self._waiting: OrderedDict[OwnerT, deque[TicketT]] = OrderedDict()
        self._held: Counter[OwnerT] = Counter()

    def ask(self, owner: OwnerT, ticket: TicketT) -> None:
        """Queues a ticket behind those of the same owner."""
        self._waiting.setdefault(owner, deque()).append(ticket)

    def leave(self, owner: OwnerT, ticket: TicketT) -> None:
        """Forgets a ticket that waits. Raises ValueError for any other."""
        tickets = self._waiting.get(owner, deque())
        tickets.remove(ticket)
        if not tickets:
            del self._waiting[owner]

    def release(self, owner: OwnerT) -> None:
        """Frees a slot of the owner."""
        self._num_free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def admit(self) -> list[TicketT]:
        """Gives free slots to waiting tickets. Returns those that now have one, in order."""
        admitted = []
        while self._num_free and (owner := self._next()) is not None:
            admitted.append(self._waiting[owner].popleft())
            self._held[owner] += 1
            self._num_free -= 1
            self._waiting.move_to_end(owner)
            if not self._waiting[owner]:
                del self._waiting[owner]
        return admitted

    def _next(self) -> OwnerT | None:
        ready = [owner for owner in self._waiting if self._held[owner] < self._max_per_owner]
        return min(ready, key=lambda owner: self._held[owner], default=None)

    @property
    def num_held(self) -> int:
        """Returns the number of slots in use."""
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))
