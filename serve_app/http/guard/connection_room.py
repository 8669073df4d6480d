"""Decides which connection is closed for another, where a process has as many as it may.

waits for a request  -->  the one that has waited longest is closed
takes no answer      -->  the one that has taken none for longest is ended
neither              -->  the new one is reserved for a probe of the server's health
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


@dataclass(slots=True)
class ConnectionRoom(Generic[C]):
    """Knows the connections of a process. Dictionaries have the oldest first.

    held: connections for any request
    waiting: of these, for a request
    stuck_since_s: when the client of each of these that takes no answer took the last of it
    reserved: connections beyond them, for probes
    """

    held: set[C] = field(default_factory=set)
    waiting: dict[C, None] = field(default_factory=dict)
    stuck_since_s: dict[C, float] = field(default_factory=dict)
    reserved: dict[C, None] = field(default_factory=dict)

    def victim(self, now_s: float, patience_s: float) -> C | None:
        """Returns the connection to close for another. patience_s: for a client that takes no answer."""
        if self.waiting:
            return next(iter(self.waiting))
        stuck, since_s = next(iter(self.stuck_since_s.items()), (None, now_s))
        return stuck if now_s - since_s >= patience_s else None

    def forget(self, connection: C) -> None:
        self.held.discard(connection)
        self.waiting.pop(connection, None)
        self.stuck_since_s.pop(connection, None)
        self.reserved.pop(connection, None)
