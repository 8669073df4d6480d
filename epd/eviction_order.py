"""Orders what a cache may drop: what was used longest ago, but first of a client that fills more than half.

So a client whose media never come again costs the others at most half of what nobody uses now. What they
keep meanwhile is not kept for ever: it goes in its turn once as much was dropped since its last use as the
cache has dropped `_NUM_TURNS` times over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_NUM_TURNS = 16


class _Client(Generic[KeyT]):
    """Holds the keys of one client, what was used longest ago first. num_blocks: of all of them."""

    __slots__ = ("keys", "name", "num_blocks")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.keys: OrderedDict[KeyT, None] = OrderedDict()
        self.num_blocks = 0


class EvictionOrder(Generic[KeyT]):
    """Holds the keys of what may be dropped, what was used longest ago first, with sizes in blocks.

    Prompts have thousands of blocks, each a key that comes and goes: so an entry is a plain tuple.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        # Whose it is, its blocks, and how many the whole order had dropped before it was used last.
        self._entries: OrderedDict[KeyT, tuple[_Client[KeyT], int, int]] = OrderedDict()
        self._clients: dict[str, _Client[KeyT]] = {}
        self._largest: _Client[KeyT] = _Client()  # who may have more than half
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
        own = self._clients.get(client)
        if own is None:
            own = self._clients[client] = _Client(client)
        self._entries[key] = own, num_blocks, self._num_dropped
        own.keys[key] = None
        own.num_blocks += num_blocks
        self.num_blocks += num_blocks
        if 2 * own.num_blocks > self.num_blocks:
            self._largest = own

    def remove(self, key: KeyT) -> None:
        """Removes what is used again, or gone. Raises KeyError for what is not there."""
        own, num_blocks, _ = self._entries.pop(key)
        del own.keys[key]
        own.num_blocks -= num_blocks
        self.num_blocks -= num_blocks
        if not own.keys:
            del self._clients[own.name]

    def touch(self, key: KeyT) -> None:
        """Puts what was used now, and may still be dropped, last."""
        own, num_blocks, _ = self._entries[key]
        self.remove(key)
        self.add(key, own.name, num_blocks)

    def first(self) -> KeyT:
        """Returns what goes first. Raises StopIteration if nothing is left."""
        oldest = next(iter(self._entries))
        num_dropped_since = self._num_dropped - self._entries[oldest][2]
        has_most = 2 * self._largest.num_blocks > self.num_blocks
        if has_most and num_dropped_since <= _NUM_TURNS * self.num_blocks:
            return next(iter(self._largest.keys))
        return oldest

    def drop(self, key: KeyT) -> None:
        """Removes what makes room for others. Raises KeyError for what is not there."""
        self._num_dropped += self._entries[key][1]
        self.remove(key)
