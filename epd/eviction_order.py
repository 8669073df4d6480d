"""Orders what a cache may drop: what was used longest ago, but first of a client that fills more than half.

So a client whose media never come again costs the others at most half of what nobody uses now. What they
keep meanwhile is not kept for ever: it goes in its turn once as much was dropped since its last use as the
cache has dropped `_NUM_TURNS` times over.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_NUM_TURNS = 16


@dataclass(frozen=True, slots=True)
class _Entry:
    """client: whose it is. size: in blocks. num_dropped: by the whole order, before its last use."""

    client: str
    size: int
    num_dropped: int


class EvictionOrder(Generic[KeyT]):
    """Holds the keys of what may be dropped, what was used longest ago first, with sizes in blocks."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._entries: OrderedDict[KeyT, _Entry] = OrderedDict()
        self._clients: dict[str, OrderedDict[KeyT, None]] = {}  # the keys of each, in the same order
        self._sizes: Counter[str] = Counter()  # of each client, blocks
        self._largest = ""  # the client that may have more than half
        self._num_dropped = 0  # blocks

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: KeyT) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[KeyT]:
        """Yields the keys, what was used longest ago first."""
        return iter(self._entries)

    def add(self, key: KeyT, client: str, num_blocks: int = 1) -> None:
        """Adds what nobody uses from now on. client: who used it last."""
        self._entries[key] = _Entry(client, num_blocks, self._num_dropped)
        self._clients.setdefault(client, OrderedDict())[key] = None
        self.num_blocks += num_blocks
        self._sizes[client] += num_blocks
        if 2 * self._sizes[client] > self.num_blocks:
            self._largest = client

    def remove(self, key: KeyT) -> None:
        """Removes what is used again, or gone. Raises KeyError for what is not there."""
        entry = self._entries.pop(key)
        self.num_blocks -= entry.size
        self._sizes[entry.client] -= entry.size
        keys = self._clients[entry.client]
        del keys[key]
        if not keys:
            del self._clients[entry.client], self._sizes[entry.client]

    def touch(self, key: KeyT) -> None:
        """Puts what was used now, and may still be dropped, last."""
        entry = self._entries[key]
        self.remove(key)
        self.add(key, entry.client, entry.size)

    def drop(self, key: KeyT) -> None:
        """Removes what is dropped for others. Raises KeyError for what is not there."""
        self._num_dropped += self._entries[key].size
        self.remove(key)

    def first(self) -> KeyT:
        """Returns what goes first. Raises StopIteration if nothing is left."""
        oldest = next(iter(self._entries))
        has_most = 2 * self._sizes[self._largest] > self.num_blocks
        unused = self._num_dropped - self._entries[oldest].num_dropped
        if has_most and unused <= _NUM_TURNS * self.num_blocks:
            return next(iter(self._clients[self._largest]))
        return oldest
