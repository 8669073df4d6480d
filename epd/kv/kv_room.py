"""Sizes a KV cache, keeps what requests hold of it, counts what is free, and evicts. No tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from epd.errors import require
from epd.kv.block_pool import SLOTS_PER_SEQUENCE, BlockPool, BlockTable, StateSlots
from epd.kv.prefix_cache import ROW_BYTES, CachedBlock, PrefixCache, TokenIdentity
from epd.kv.windows import WindowTable
from epd.types import ceil_div

# Of a head of a token whose values have 8 bits: float32.
SCALE_BYTES = 4
# States and windows that are kept beside those of answers, for prompts that begin alike.
_NUM_KEPT = 8


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Sizes the cache.

    num_blocks: of each layer group with attention. block_size: tokens.
    num_states: slots of recurrent states; 0 for a model without them.
    windows: of each layer group, tokens that one attends; None for all. Groups with a window come last.
    num_ahead: tokens of a request that are computed at once, for which its windows have room.
    """

    num_blocks: tuple[int, ...]
    block_size: int
    num_states: int = 0
    windows: tuple[int | None, ...] = ()
    num_ahead: int = 1

    def __post_init__(self) -> None:
        if not self.num_blocks or min(self.num_blocks) < 1 or self.block_size < 1:
            raise ValueError(f"a KV cache needs at least 1 layer group of 1 block of 1 token, got {self}")
        if self.num_states and self.num_states < SLOTS_PER_SEQUENCE:
            raise ValueError(f"a sequence needs {SLOTS_PER_SEQUENCE} slots for its state, got {self}")
        has_window = [window is not None for window in self.windows]
        if self.windows and (len(has_window) != len(self.num_blocks) or has_window != sorted(has_window)):
            raise ValueError(
                f"each layer group needs a window or None, groups of all tokens first, got {self}"
            )
        if all(has_window) and has_window:
            raise ValueError(f"a KV cache needs a layer group of all tokens, got {self}")

    @property
    def num_windows(self) -> int:
        """Returns the number of layer groups with a window, the last ones."""
        return sum(window is not None for window in self.windows)

    @property
    def num_full(self) -> int:
        """Returns the number of layer groups that keep all tokens, the first ones."""
        return len(self.num_blocks) - self.num_windows

    @property
    def keeps_states(self) -> bool:
        """Returns whether a prompt begins only where a state, or the blocks of a window, were kept."""
        return self.num_states > 0 or self.num_windows > 0

    def first_attended(self, layer_group: int, num_tokens: int) -> int:
        """Returns the first token that one after `num_tokens` tokens attends."""
        window = self.windows[layer_group] if self.windows else None
        return 0 if window is None else max(num_tokens - window + 1, 0)

    def most_blocks(self, layer_group: int, num_tokens: int, num_ahead: int = 0) -> int:
        """Returns the blocks that a request of `num_tokens` tokens may hold in a layer group at a time.

        num_ahead: tokens of it that are computed at once, if they are more than of others.
        """
        num_blocks = ceil_div(num_tokens, self.block_size)
        window = self.windows[layer_group] if self.windows else None
        if window is None:
            return num_blocks
        reach = window - 1 + max(self.num_ahead, num_ahead)
        return min(num_blocks, ceil_div(reach, self.block_size) + 1)


def window_blocks(window: int, block_size: int, max_num_seqs: int, max_chunk_tokens: int) -> int:
    """Returns the blocks for so many windows, those of kept prompts, and a chunk: no more are ever needed."""
    each = ceil_div(window, block_size) + 1
    return (max_num_seqs + _NUM_KEPT) * each + ceil_div(max_chunk_tokens, block_size)


def state_slots(max_num_seqs: int) -> int:
    """Returns the slots for the recurrent states of so many answers, and of kept prompts."""
    return SLOTS_PER_SEQUENCE * max_num_seqs + _NUM_KEPT


@dataclass(frozen=True, slots=True)
class Shortage:
    """Records the lacking room when a request was opened.

    blocks: of each layer group, those it needs beside the cached ones that others held as well.
    num_pinned: of the prefix cache, at that time.
    num_states: slots that it needs.
    """

    blocks: tuple[int, ...]
    num_pinned: int
    num_states: int = 0


class RequestBlocks:
    """Holds a request's block table for each layer group, and pins on the nodes of its whole blocks.

    state: its recurrent state; None for a model that has none.
    windows: its tables of layer groups with a window.
    keeps_all: whether every token has a place of its own in every layer.
    """

    __slots__ = (
        "_cache",
        "capacity",
        "identity",
        "is_shareable",
        "keeps_all",
        "next_share",
        "path",
        "state",
        "tables",
        "windows",
    )

    def __init__(
        self,
        cache: PrefixCache,
        tables: list[BlockTable],
        identity: TokenIdentity,
        is_shareable: bool,
        state: StateSlots | None = None,
    ) -> None:
        self._cache = cache
        self.tables = tables
        self.state = state
        self.windows = [table for table in tables if isinstance(table, WindowTable)]
        self.keeps_all = state is None and not self.windows
        self.identity = identity
        self.is_shareable = is_shareable
        self.path: list[CachedBlock] = []
        self.capacity = 0  # tokens of group 0 with which a group, or the state, has no more room
        self.next_share = 0  # tokens with which the next block is whole

    @property
    def num_tokens(self) -> int:
        return self.tables[0].num_tokens

    @property
    def lengths(self) -> list[int]:
        return [table.num_tokens for table in self.tables]

    def refresh(self) -> None:
        """Derives counts from tables and path, so that most tokens need one comparison."""
        room = 0 if self.num_missing_states else min([table.usable_room for table in self.tables])
        self.capacity = self.num_tokens + room
        self.next_share = (len(self.path) + 1) * self.tables[0].block_size

    @property
    def num_missing_states(self) -> int:
        """Returns how many slots its next tokens need."""
        return 0 if self.state is None else self.state.num_missing

    def num_missing(self, num_tokens: int, arriving: int = 0) -> list[int]:
        added = num_tokens - self.num_tokens
        return [table.num_missing(added, arriving) for table in self.tables]

    def num_added_by_fork(self, num_tokens: int = 0) -> list[int]:
        """Returns, for each layer group, the blocks that a child with `num_tokens` tokens does not share."""
        added = max(num_tokens - self.num_tokens, 0)
        return [table.num_added_by_fork(added) for table in self.tables]

    def pin(self, path: Iterable[CachedBlock]) -> None:
        """Builds upon nodes of the prefix cache, each below the one before."""
        for node in path:
            self._cache.pin(node)
            self.path.append(node)

    def unpin(self, keep: int) -> None:
        """Unpins the nodes past the first `keep`, the deepest first: see `epd/kv/prefix_cache.py`."""
        for node in reversed(self.path[keep:]):
            self._cache.unpin(node, self.identity.client)
        del self.path[keep:]

    def keep_state(self) -> None:
        """Lets the prefix cache hold what a prompt that begins with the written tokens needs beside blocks.

        The slot of the recurrent state, if there is any, then the blocks of each window. All in whole blocks.
        """
        has_state = self.state is None or self.state.current is not None
        if not has_state or not self.path or self.num_tokens != len(self.path) * self._cache.block_size:
            return
        slots = () if self.state is None or self.state.current is None else ((self.state.current,),)
        kept = (*slots, *(table.kept for table in self.windows))
        if kept:
            self._cache.snapshots.keep(self.path[-1], kept)

    def use_state(self) -> None:
        """Begins with what another request has kept after the blocks that are shared."""
        kept, windows = self._cache.snapshots.use(self.path[-1]), self.windows
        if self.state is not None:
            self.state.share(kept[0][0])
        for table, blocks in zip(windows, kept[len(kept) - len(windows) :], strict=True):
            table.share_window(blocks, self.tables[0].num_whole)

    def share_path(self, path: Iterable[CachedBlock]) -> None:
        """Begins with the blocks of cached nodes."""
        self.pin(path)
        for group, table in enumerate(self.tables[: len(self.tables) - len(self.windows)]):
            table.share([node.blocks[group] for node in self.path])

    def share_whole_blocks(self) -> None:
        """Puts the blocks that have become whole into the prefix cache.

        Where another request was first with the same tokens, this one keeps its own block and builds on the
        other's node: a block that may be being read or sent is never replaced.
        """
        size, first, stop = self._cache.block_size, len(self.path), self.tables[0].num_whole
        node = self.path[-1] if first else self._cache.root
        keys = self.identity.chunks(first * size, stop * size, size)
        for index, key in enumerate(keys, start=first):
            node = self._cache.child(node, key, self._blocks_at(index))
            self.pin([node])
        self.next_share = (stop + 1) * size

    def share_partial(self) -> None:
        """Lets the prefix cache find the written part of the last block."""
        index = self.tables[0].num_whole
        rows = self.identity.row_bytes(index * self._cache.block_size, self.num_tokens)
        parent = self.path[-1] if self.path else self._cache.root
        self._cache.add_partial(parent, rows, self._blocks_at(index), self.identity.client)

    def _blocks_at(self, index: int) -> tuple[int, ...]:
        """Returns the block at a place of each table without a window."""
        return tuple(table.blocks[index] for table in self.tables if not isinstance(table, WindowTable))


class KVRoom:
    """Holds the pools of a cache and the prefix cache over them; idle cached blocks count as free.

    pools: of each layer group. states: slots of recurrent states; None for a model that has none.
    """

    def __init__(self, spec: KVCacheSpec, make_pool: Callable[[int], BlockPool]) -> None:
        self._spec = spec
        self.pools = [make_pool(num_blocks) for num_blocks in spec.num_blocks]
        self.states = make_pool(spec.num_states) if spec.num_states else None
        # What is kept after some cached blocks alone: the slots, then the blocks of each window.
        slots = [] if self.states is None else [self.states]
        full, windows = self.pools[: spec.num_full], self.pools[spec.num_full :]
        self.cache = PrefixCache(full, spec.block_size, [*slots, *windows])

    def tables_for(self, identity: TokenIdentity, is_shareable: bool) -> RequestBlocks:
        """Returns the empty tables of a new request."""
        tables = [self._table(group) for group in range(len(self.pools))]
        state = None if self.states is None else StateSlots(self.states)
        return RequestBlocks(self.cache, tables, identity, is_shareable, state)

    def _table(self, layer_group: int) -> BlockTable:
        spec, pool = self._spec, self.pools[layer_group]
        window = spec.windows[layer_group] if spec.windows else None
        if window is None:
            return BlockTable(pool, spec.block_size)
        return WindowTable(pool, spec.block_size, window, spec.num_ahead)

    def num_free(self, layer_group: int) -> int:
        """Returns how many blocks are available: free ones, and cached ones that no request uses."""
        return self.pools[layer_group].num_free + self._num_idle(layer_group)

    def all_free(self) -> list[int]:
        return [self.num_free(group) for group in range(len(self.pools))]

    def _num_idle(self, layer_group: int) -> int:
        if layer_group < self._spec.num_full:
            return self.cache.num_idle
        return self.cache.snapshots.num_idle(self._kept_index(layer_group))

    def _kept_index(self, layer_group: int) -> int:
        """Returns the place of a layer group with a window among the pools of what is kept."""
        return layer_group - self._spec.num_full + int(self.states is not None)

    def has_states(self, count: int) -> bool:
        """Returns whether this many slots are available: free ones, and snapshots that nobody else holds."""
        if self.states is None or count <= self.states.num_free:
            return True
        return count <= self.states.num_free + self.cache.snapshots.num_idle(0)

    def has(self, needed: Sequence[int], num_states: int = 0) -> bool:
        """Returns whether so many blocks of each layer group are available, and so many slots."""
        return self._has_blocks(needed) and self.has_states(num_states)

    def _has_blocks(self, needed: Sequence[int]) -> bool:
        return all(
            num <= pool.num_free or num <= pool.num_free + self._num_idle(group)
            for group, (num, pool) in enumerate(zip(needed, self.pools, strict=True))
        )

    def make(self, needed: Sequence[int], purpose: str, num_states: int = 0) -> None:
        """Evicts until `needed` blocks of each layer group are free, and `num_states` slots.

        Raises ValueError, and changes nothing, if that cannot be.
        """
        if not self._has_blocks(needed):
            raise ValueError(
                f"{purpose} needs {list(needed)} blocks, {self.all_free()} are free; free a request first"
            )
        if not self.has_states(num_states):
            raise ValueError(f"{purpose} needs {num_states} states, 0 are free; free a request first")
        pairs, num_full = list(zip(needed, self.pools, strict=True)), self._spec.num_full
        lacking = max([num - pool.num_free for num, pool in pairs[:num_full]])
        if lacking > 0:
            self.cache.evict(lacking)
        if self.states is not None:
            self.cache.snapshots.free(0, num_states)
        for group in range(num_full, len(pairs)):
            self.cache.snapshots.free(self._kept_index(group), needed[group])

    def add_restored(
        self, path: list[CachedBlock], identity: TokenIdentity, stop: int, restored: Sequence[tuple[int, ...]]
    ) -> None:
        """Adds blocks behind a path of pinned nodes, which gets those that are whole."""
        size = self.cache.block_size
        for key, blocks in zip(identity.chunks(len(path) * size, stop, size), restored, strict=True):
            num_tokens = len(key) // ROW_BYTES
            parent = path[-1] if path else self.cache.root
            for pool, block in zip(self.pools, blocks, strict=True):
                pool.write(block, 0, num_tokens)
            if num_tokens == size:
                path.append(self.cache.child(parent, key, blocks))
                self.cache.pin(path[-1])
            else:
                self.cache.add_partial(parent, key, blocks, identity.client)
            for pool, block in zip(self.pools, blocks, strict=True):
                pool.release(block)  # it is the prefix cache's

    def check_integrity(self, requests: Collection[RequestBlocks]) -> None:
        """Raises AssertionError unless every block, slot and node is held as often as is counted."""
        self.cache.check_integrity()
        for group, pool in enumerate(self.pools):
            held = Counter(chain.from_iterable(request.tables[group].held for request in requests))
            if pool not in self.cache.snapshots.pools:
                held.update(node.blocks[group] for node in self.cache.nodes())
            _check_pool(pool, held, self.cache)
        if self.states is not None:
            slots = (request.state.held for request in requests if request.state is not None)
            _check_pool(self.states, Counter(chain.from_iterable(slots)), self.cache)
        pins = Counter(node for request in requests for node in request.path)
        for node in self.cache.nodes():
            if node.num_pins != pins[node]:
                raise AssertionError(f"{node.num_pins} pins are counted, {pins[node]} are held")
        for request in requests:
            _check_request(request, self.cache)


def _check_pool(pool: BlockPool, held: Counter[int], cache: PrefixCache) -> None:
    """held: by requests and nodes; what snapshots hold is added."""
    pool.check_integrity()
    if pool in cache.snapshots.pools:
        held.update(cache.snapshots.held(cache.snapshots.pools.index(pool)))
    pool.check_holders(held)


def _check_request(request: RequestBlocks, cache: PrefixCache) -> None:
    size, parent = cache.block_size, cache.root
    for table in request.tables:
        table.check_integrity()
    for index, node in enumerate(request.path):
        rows = request.identity.row_bytes(index * size, (index + 1) * size)
        require(node.parent is parent and node.key == rows, "pins on nodes of other tokens")
        parent = node
    require(len(request.path) <= max(request.lengths) // size, "pins past the tokens that are written")
    if request.state is not None:
        has_state = request.state.current is not None or request.state.is_awaited
        require(has_state == (request.num_tokens > 0), "tokens without a state, or a state without any")
    derived = request.capacity, request.next_share
    request.refresh()
    if derived != (request.capacity, request.next_share):
        raise AssertionError(f"stale, of before a change: {derived}")
