"""Keeps, shares and evicts embeddings and tracks their holders: the policy of an encoder cache, no tensors.

An entry is the embeddings of one group, in blocks of `block_size` embeddings:

                reserve                commit                last release
    (unknown) ----------> pending,held --------> ready,held <------------> ready,idle --evict--> (unknown)
                             | last release                      acquire
                             +----------> (unknown), its blocks are free at once

The writer of an entry holds it while pending, so a pending entry without a holder has no writer. An entry of
a reading has no use to others: its last release frees it, ready or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epd.errors import InfeasibleError, require
from epd.eviction_order import EvictionOrder
from epd.types import ceil_div


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Identifies the embeddings of one group by their inputs alone, so that equal keys may share them.

    mm_hash: of the bytes of the image or video
    times_s: of the group's frames, and those drawn on them; empty for an image
    units: [start, stop) of an image's tiles; (0, 0) for a video, which its times identify
    size: (height, width) of the frames that are encoded, or of the image that is cut into tiles, pixels
    model: name and revision of the weights
    tower_share: of a unit's tokens, that later layers of the tower compute if it can merge; None for all
    reading: the reading of an item that keeps only these embeddings, "" for all embeddings of the group
    salt: digest of the salt of those that may share them, which is in mm_hash too; "" for all
    client: whose cached blocks they count as; it identifies nothing
    """

    mm_hash: str
    times_s: tuple[float, ...]
    units: tuple[int, int]
    size: tuple[int, int]
    model: str
    tower_share: float | None = None
    reading: str = ""
    salt: str = ""
    client: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Describes a planned group: its content, its number of embeddings and its patches."""

    key: GroupKey
    num_embeddings: int
    num_patches: int


@dataclass(slots=True)
class _Entry:
    num_embeddings: int
    block_ids: tuple[int, ...]
    places: tuple[int, ...] = ()
    is_ready: bool = False
    holders: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class CachedGroup:
    """Locates the embeddings of one group: the first `num_embeddings` rows of these blocks, in order.

    places: of kept embeddings, in order, among all visual tokens of their item; empty where all are kept
    """

    num_embeddings: int
    block_ids: tuple[int, ...]
    places: tuple[int, ...] = ()


@dataclass(slots=True)
class CacheCounts:
    """Counts events so far. hits: `acquire` of present entries; misses: `reserve`."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class EncoderCacheManager:
    """Manages blocks, entries and references of one worker; idle ones are evicted as `EvictionOrder` says."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"at least 1 block of 1 embedding is needed, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counts = CacheCounts()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._entries: dict[GroupKey, _Entry] = {}
        self._idle: EvictionOrder[GroupKey] = EvictionOrder()

    def __contains__(self, key: GroupKey) -> bool:
        """Returns whether the key is ready or pending."""
        return key in self._entries

    def is_ready(self, key: GroupKey) -> bool:
        """Returns whether the embeddings can be read."""
        return key in self._entries and self._entries[key].is_ready

    def blocks_for(self, num_embeddings: int) -> int:
        return ceil_div(num_embeddings, self.block_size)

    def can_reserve(self, num_embeddings: int) -> bool:
        """Returns whether `reserve` would find room now, by evicting if necessary."""
        return self.blocks_for(num_embeddings) <= len(self._free) + self._idle.num_blocks

    def check_fits(self, num_embeddings: int) -> None:
        """Raises InfeasibleError for a group that would not fit into the empty cache."""
        if self.blocks_for(num_embeddings) > self.num_blocks:
            raise InfeasibleError(
                f"{num_embeddings} embeddings do not fit into an encoder cache of "
                f"{self.num_blocks * self.block_size}; enlarge the cache or make groups smaller"
            )

    def reserve(self, key: GroupKey, num_embeddings: int, holder: str) -> CachedGroup:
        """Reserves room for embeddings that `holder` will write, and evicts if necessary.

        Raises ValueError when the key is present already or there is no room: see `can_reserve`.
        """
        needed = self.blocks_for(num_embeddings)
        if key in self or num_embeddings < 1 or not self.can_reserve(num_embeddings):
            raise ValueError(f"cannot reserve {num_embeddings} embeddings, {needed} blocks, for {key}")
        while len(self._free) < needed:
            self._evict(self._idle.first())
        blocks = tuple(self._free.pop() for _ in range(needed))
        self._entries[key] = _Entry(num_embeddings, blocks, holders={holder})
        self.counts.misses += 1
        return CachedGroup(num_embeddings, blocks)

    def commit(self, key: GroupKey, places: tuple[int, ...] = ()) -> None:
        """Marks the embeddings as written; from now on they may be read. places: see `CachedGroup`."""
        self._entries[key].is_ready = True
        self._entries[key].places = places

    def acquire(self, key: GroupKey, holder: str) -> None:
        """Keeps an entry, ready or pending, from eviction. Raises KeyError for an unknown one."""
        entry = self._entries[key]
        if holder in entry.holders:
            raise ValueError(f"'{holder}' holds {key} already")
        if key in self._idle:
            self._idle.remove(key)
        entry.holders.add(holder)
        self.counts.hits += 1

    def release(self, key: GroupKey, holder: str) -> None:
        """Gives a reference back. The last one makes a ready entry evictable.

        It frees a pending one, and that of a reading.
        """
        entry = self._entries[key]
        entry.holders.remove(holder)
        if entry.holders:
            return
        if entry.is_ready and not key.reading:
            self._idle.add(key, key.client, len(entry.block_ids))
        else:
            self._remove(key)

    def get(self, key: GroupKey) -> CachedGroup:
        """Returns where the entry is. Raises KeyError for an unknown one."""
        entry = self._entries[key]
        return CachedGroup(entry.num_embeddings, entry.block_ids, entry.places)

    def holders(self, key: GroupKey) -> frozenset[str]:
        """Returns the holders of the entry; none for an unknown one."""
        return frozenset(self._entries[key].holders) if key in self._entries else frozenset()

    @property
    def num_free_blocks(self) -> int:
        """Returns the blocks of no entry; those of idle entries are not counted."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Returns the number of entries with a holder."""
        return len(self._entries) - len(self._idle)

    def eviction_order(self) -> Sequence[GroupKey]:
        """Returns the entries that may be evicted, what was used longest ago first."""
        return list(self._idle)

    def _evict(self, key: GroupKey) -> None:
        self.counts.evictions += 1
        self._idle.drop(key)
        self._remove(key)

    def _remove(self, key: GroupKey) -> None:
        self._free.extend(self._entries.pop(key).block_ids)

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block is free or in exactly one entry and idle entries match."""
        owned = [block for entry in self._entries.values() for block in entry.block_ids]
        require(sorted(owned + self._free) == list(range(self.num_blocks)), "blocks lost or owned twice")
        for key, entry in self._entries.items():
            require(len(entry.block_ids) == self.blocks_for(entry.num_embeddings), f"wrong size: {key}")
            require(bool(entry.holders) or entry.is_ready, f"pending and held by nobody: {key}")
            require((key in self._idle) == (not entry.holders), f"idle and held, or neither: {key}")
        require(set(self._idle) <= self._entries.keys(), "an idle entry that does not exist")
        idle = sum(len(self._entries[key].block_ids) for key in self._idle)
        require(idle == self._idle.num_blocks, f"{idle} blocks are idle, not {self._idle.num_blocks}")
