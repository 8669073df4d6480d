"""Identifies every token of a request, and finds committed KV blocks by these: only equal tokens share them.

One row of three int64 per token:

    text             (token id,               0,          0         )
    visual token     (-(index in unit) - 1,   digest_hi,  digest_lo )

The first row of a prompt with a cache salt has the salt's digest beside its token: prefixes begin with it, so
nothing is shared with prompts of another salt or none.

A text row never begins with a negative number and a visual row always does, so the two cannot be confused.
The digest names all that the unit's embeddings depend on: bytes of the media, times, size, grid, spans,
reduction. Tokens of media that attend each other, and what lies between, have the digest of all of these in
its place, texts too: `as_one`.

Blocks are found in a trie, in which every row of a hit is equal:

    root ── [sys0 sys1 sys2 sys3] ── [vid0 vid1 vid2 vid3] ─┬─ [vid4 what is  it ]
                                                            └─ [vid4 where     ]   partial: has no children

A node is one block in every layer group. Requests pin the nodes they build upon, always together with all
nodes above, so a node without pins (idle) has only idle nodes below it, and these became idle no later: the
order in which nodes became idle is an order of eviction that takes leaves first.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from epd.errors import require
from epd.eviction_order import EvictionOrder
from epd.kv.block_pool import BlockPool
from epd.types import Int64Array, PlaceholderRange

ROW_COLUMNS = 3
ROW_BYTES = 8 * ROW_COLUMNS
DIGEST_BYTES = 16
_LEAST_CAPACITY = 64


class TokenIdentity:
    """Holds the rows of one request, int64 [T, 3]; generated tokens are appended, old rows never change."""

    __slots__ = ("_buffer", "_length", "client")

    def __init__(self, rows: Int64Array, client: str = "") -> None:
        """client: whose cached blocks its tokens count as."""
        if rows.ndim != 2 or rows.shape[1] != ROW_COLUMNS or rows.dtype != np.int64:
            raise ValueError(f"identity rows must be int64 [T, {ROW_COLUMNS}], got {rows.dtype} {rows.shape}")
        self.client = client
        self._length = len(rows)
        self._buffer = _with_room(rows)

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Int64Array:
        """Returns a view of the rows, int64 [T, 3], for reading."""
        return self._buffer[: self._length]

    def append(self, token_id: int) -> None:
        """Adds one text token, in constant time."""
        if self._length == len(self._buffer):
            self._buffer = _with_room(self._buffer)
        self._buffer[self._length, 0] = token_id
        self._length += 1

    def row_bytes(self, start: int, stop: int) -> bytes:
        """Returns the exact bytes of rows [start, stop). Raises ValueError for rows that are not there."""
        if not 0 <= start <= stop <= self._length:
            raise ValueError(
                f"rows [{start}, {stop}) were requested, [0, {self._length}) are known; append the rest"
            )
        return self._buffer[start:stop].tobytes()

    def chunks(self, start: int, stop: int, size: int) -> Iterator[bytes]:
        """Yields the exact bytes of rows [start, stop) in runs of `size` rows, the last maybe shorter."""
        data, size = self.row_bytes(start, stop), size * ROW_BYTES
        return (data[at : at + size] for at in range(0, len(data), size))

    def copy(self) -> TokenIdentity:
        """Returns a copy that grows separately, for a forked request."""
        return self.first(len(self))

    def first(self, num_tokens: int) -> TokenIdentity:
        """Returns a copy of the first rows."""
        return TokenIdentity(self.rows[:num_tokens], self.client)

    def __reduce__(self) -> tuple[type[TokenIdentity], tuple[Int64Array, str]]:
        return TokenIdentity, (self.rows, self.client)


def _with_room(rows: Int64Array) -> Int64Array:
    """Returns a copy with zeros behind it: a text row needs only its first column written."""
    buffer = np.zeros((max(2 * len(rows), _LEAST_CAPACITY), ROW_COLUMNS), np.int64)
    buffer[: len(rows)] = rows
    return buffer


def token_identity(
    token_ids: Sequence[int],
    units: Sequence[tuple[PlaceholderRange, bytes]] = (),
    salt: bytes = b"",
    client: str = "",
) -> TokenIdentity:
    """Returns the identity of a prompt.

    units: the place of each visual unit, and the 16 byte digest of its content.
    salt: 16 byte digest of the cache salt, or empty.
    client: see `TokenIdentity`
    Raises ValueError for a digest of another length or a unit outside of the prompt.
    """
    rows = np.zeros((len(token_ids), ROW_COLUMNS), np.int64)
    rows[:, 0] = token_ids
    for place, digest in units:
        if len(digest) != DIGEST_BYTES or place.stop > len(rows):
            raise ValueError(
                f"{place} with a digest of {len(digest)} bytes does not fit a prompt of {len(rows)} tokens; "
                f"digests have {DIGEST_BYTES} bytes"
            )
        rows[place.offset : place.stop, 0] = -1 - np.arange(place.length)
        rows[place.offset : place.stop, 1:] = np.frombuffer(digest, ">i8")
    if salt:
        rows[:1, 1:] ^= np.frombuffer(salt, ">i8").astype(np.int64)
    return TokenIdentity(rows, client)


def as_one(identity: TokenIdentity, span: range) -> TokenIdentity:
    """Returns an identity of which each token in `span` names all of these, since each depends on all."""
    rows = identity.rows.copy()
    digest = hashlib.blake2b(identity.row_bytes(span.start, span.stop), digest_size=DIGEST_BYTES).digest()
    rows[span.start : span.stop, 1:] = np.frombuffer(digest, ">i8")
    return TokenIdentity(rows, identity.client)


class CachedBlock:
    """Holds a node. key: the exact bytes of its tokens' identity rows. blocks: one id per layer group."""

    __slots__ = ("blocks", "children", "key", "keys", "num_pins", "parent")

    def __init__(self, parent: CachedBlock | None, key: bytes, blocks: tuple[int, ...]) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.num_pins = 0
        self.children: dict[bytes, CachedBlock] = {}
        self.keys: list[bytes] = []  # of the children, sorted: neighbours have the longest common runs

    @property
    def num_tokens(self) -> int:
        return len(self.key) // ROW_BYTES


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Locates a prompt's cached part: whole blocks from its start, then `num_partial` rows of one more."""

    path: list[CachedBlock]
    partial: CachedBlock | None
    num_partial: int


class Snapshots(OrderedDict[CachedBlock, tuple[tuple[int, ...], ...]]):
    """Maps nodes to what is kept after their last token, of each of `pools`; what was used last comes last.

    pools: of a model that keeps more than tokens: slots of recurrent states, and blocks of windows.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        super().__init__()
        self.pools = pools

    def keep(self, node: CachedBlock, kept: tuple[tuple[int, ...], ...]) -> None:
        """Keeps what is needed after a node's last token, unless it is kept already."""
        if node not in self:
            for pool, numbers in zip(self.pools, kept, strict=True):
                for number in numbers:
                    pool.share(number)
            self[node] = kept
        self.move_to_end(node)

    def use(self, node: CachedBlock) -> tuple[tuple[int, ...], ...]:
        """Returns what is kept after a node's last token, which is used now."""
        self.move_to_end(node)
        return self[node]

    def num_idle(self, index: int) -> int:
        """Returns how many slots or blocks of a pool these alone hold."""
        held, pool = self.held(index), self.pools[index]
        return sum(pool.references(number) == count for number, count in held.items())

    def held(self, index: int) -> Counter[int]:
        """Counts how often these hold each slot or block of a pool."""
        return Counter(number for kept in self.values() for number in kept[index])

    def free(self, index: int, num_free: int) -> None:
        """Drops some until so many of a pool are free, those first that have not been used for longest.

        Those of which requests hold all stay: nothing would become free.
        """
        pool, held = self.pools[index], self.held(index)
        for node, kept in list(self.items()):
            if pool.num_free >= num_free:
                return
            if any(pool.references(number) == held[number] for number in kept[index]):
                held.subtract(kept[index])
                self.drop(node)

    def drop(self, node: CachedBlock) -> None:
        """Drops what is kept after a node, if anything is."""
        for pool, numbers in zip(self.pools, self.pop(node, ()), strict=False):
            pool.release(*numbers)


class PrefixCache:
    """Keeps the trie, its pins and the eviction order of idle nodes. It holds each of its blocks once."""

    def __init__(self, pools: Sequence[BlockPool], block_size: int, kept: Sequence[BlockPool] = ()) -> None:
        """Takes the pools of layer groups whose tokens are all kept. kept: see `Snapshots`."""
        self.root = CachedBlock(None, b"", ())
        self.block_size = block_size
        self.num_evictions = 0
        self.num_pinned = 0  # how often a node became pinned that was not, new ones included
        self._pools = pools
        self._idle: EvictionOrder[CachedBlock] = EvictionOrder()
        self.snapshots = Snapshots(kept)

    @property
    def num_idle(self) -> int:
        """Returns the number of nodes without pins; each is one block in every layer group."""
        return len(self._idle)

    def is_idle(self, node: CachedBlock) -> bool:
        return node in self._idle

    def match(self, identity: TokenIdentity, max_tokens: int, *, needs_state: bool = True) -> PrefixMatch:
        """Returns the longest cached prefix of at most `max_tokens` tokens. Changes nothing.

        Where there are snapshots it has whole blocks. needs_state: one was kept after the last.
        """
        match = self._longest(identity, max_tokens)
        if not self.snapshots.pools:
            return match
        while needs_state and match.path and match.path[-1] not in self.snapshots:
            match.path.pop()
        return PrefixMatch(match.path, None, 0)

    def _longest(self, identity: TokenIdentity, max_tokens: int) -> PrefixMatch:
        node = self.root
        path: list[CachedBlock] = []
        for key in identity.chunks(0, min(max_tokens, len(identity)), self.block_size):
            child = node.children.get(key)
            if child is None or len(child.key) < self.block_size * ROW_BYTES:
                return PrefixMatch(path, *_longest_run(node, key))
            path.append(child)
            node = child
        return PrefixMatch(path, None, 0)

    def child(self, parent: CachedBlock, key: bytes, blocks: tuple[int, ...]) -> CachedBlock:
        """Returns the unpinned node of these rows below `parent`, made of `blocks` if it is new."""
        node = parent.children.get(key)
        return self._insert(parent, key, blocks) if node is None else node

    def add_partial(self, parent: CachedBlock, key: bytes, blocks: tuple[int, ...], client: str = "") -> None:
        """Keeps the rows of a block that is not full, unless a child of `parent` begins with them already."""
        at = bisect_left(parent.keys, key)
        if at < len(parent.keys) and parent.keys[at].startswith(key):
            self.touch(parent.children[parent.keys[at]])
        else:
            self._idle.add(self._insert(parent, key, blocks), client)

    def _insert(self, parent: CachedBlock, key: bytes, blocks: tuple[int, ...]) -> CachedBlock:
        for size in range(ROW_BYTES, len(key), ROW_BYTES) if parent.children else ():
            superseded = parent.children.get(key[:size])
            if superseded is not None:
                self._idle.remove(superseded)
                self._remove(superseded)
        node = CachedBlock(parent, key, blocks)
        parent.children[key] = node
        insort(parent.keys, key)
        for pool, block in zip(self._pools, blocks, strict=True):
            pool.share(block)
        return node

    def pin(self, node: CachedBlock) -> None:
        """Protects a node from eviction; its parent must be pinned already."""
        if not node.num_pins:
            if node in self._idle:
                self._idle.remove(node)
            self.num_pinned += 1
        node.num_pins += 1

    def unpin(self, node: CachedBlock, client: str = "") -> None:
        """Removes a pin of a client's; nodes below must be unpinned first."""
        node.num_pins -= 1
        if not node.num_pins:
            self._idle.add(node, client)

    def touch(self, node: CachedBlock) -> None:
        """Moves a used idle node to the end of the eviction order; its parent is pinned or the root."""
        if node in self._idle:
            self._idle.touch(node)

    def evict(self, count: int) -> None:
        """Drops `count` idle nodes in the order of `EvictionOrder`, leaves first."""
        for _ in range(count):
            node = self._idle.first()
            while node.children:  # of other clients, who used it before
                node = next(iter(node.children.values()))
            self._idle.drop(node)
            self._remove(node)
            self.num_evictions += 1

    def _remove(self, node: CachedBlock) -> None:
        assert node.parent is not None
        self.snapshots.drop(node)
        del node.parent.children[node.key]
        del node.parent.keys[bisect_left(node.parent.keys, node.key)]
        for pool, block in zip(self._pools, node.blocks, strict=True):
            pool.release(block)

    def nodes(self) -> Iterator[CachedBlock]:
        """Yields all nodes but the root, each after its parent."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def check_integrity(self) -> None:
        """Raises AssertionError unless idle is unpinned, leaves go first, nodes are in place and written."""
        nodes = list(self.nodes())
        order = {node: place for place, node in enumerate(self._idle)}
        require(order.keys() == {node for node in nodes if not node.num_pins}, "idle and pinned, or neither")
        require(self.snapshots.keys() <= set(nodes), "a snapshot after what is not cached")
        require(
            all(node.num_tokens == self.block_size for node in self.snapshots),
            "a snapshot in the middle of a block",
        )
        for node in [self.root, *nodes]:
            require(node.keys == sorted(node.children), "keys differ from the children's")
            nested = any(b.startswith(a) for a, b in pairwise(node.keys))
            require(not nested, "part of a block beside a block that begins with it")
            is_root, is_whole = node is self.root, node.num_tokens == self.block_size
            require(not node.children or is_root or is_whole, "children of part of a block")
            require(is_whole or not node.num_pins, "a pin on part of a block")
            for pool, block in zip(self._pools, node.blocks, strict=False):  # the root has none
                if (written := pool.num_written(block)) < node.num_tokens:
                    raise AssertionError(
                        f"{node.num_tokens} tokens are cached in block {block}, "
                        f"of which {node.num_tokens - written} were never written"
                    )
            place = order.get(node, len(order))
            for key, child in node.children.items():
                require(child.key == key and child.parent is node, "a child of another node")
                require(is_root or child.num_pins <= node.num_pins, "pinned below what is not")
                require(order.get(child, -1) < place, "a node goes before its child")


def _longest_run(parent: CachedBlock, rows: bytes) -> tuple[CachedBlock | None, int]:
    """Returns the child that begins with most of these rows, a neighbour among sorted keys, and how many."""
    at = bisect_left(parent.keys, rows)
    near = parent.keys[max(at - 1, 0) : at + 1]
    best = max(near, key=lambda key: _common_rows(key, rows), default=b"")
    num_rows = _common_rows(best, rows)
    return (parent.children[best], num_rows) if num_rows else (None, 0)


def _common_rows(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    for at in range(0, size, ROW_BYTES):
        if a[at : at + ROW_BYTES] != b[at : at + ROW_BYTES]:
            return at // ROW_BYTES
    return size // ROW_BYTES
