"""Receives groups of requests: room is granted in order, groups are ready in any order and taken in order.

    groups of a request   |  0    1    2    3    4    5  |
                          [released)[ taken  )[granted    )      half-open, each pointer only moves right
    held references                  [       references    )

Room is granted first come, first served over all requests: the oldest gets all its groups before a younger
one gets its next, so a request that has begun can always end. No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd.encode.encoder_cache import CachedGroup, EncoderCacheManager, GroupKey, GroupSpec
from epd.transfer.connectors import Ticket
from epd.transfer.transfers import Inbox


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
