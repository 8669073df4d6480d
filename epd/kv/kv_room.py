"""Counts what is free of a KV cache's blocks and slots, and makes room by eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain

from epd.errors import require
from epd.kv.block_pool import BlockPool, BlockTable
from epd.kv.kv_identity import TokenIdentity
from epd.kv.kv_request import RequestBlocks
from epd.kv.kv_spec import KVCacheSpec
from epd.kv.prefix_cache import PrefixCache
from epd.kv.states import StateSlots
from epd.kv.windows import WindowTable


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
        return self.cache.num_idle_kept(self._kept_index(layer_group))

    def _kept_index(self, layer_group: int) -> int:
        """Returns the place of a layer group with a window among the pools of what is kept."""
        return layer_group - self._spec.num_full + int(self.states is not None)

    def has_states(self, count: int) -> bool:
        """Returns whether this many slots are available: free ones, and snapshots that nobody else holds."""
        if self.states is None or count <= self.states.num_free:
            return True
        return count <= self.states.num_free + self.cache.num_idle_kept(0)

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
            self.cache.drop_states(0, num_states)
        for group in range(num_full, len(pairs)):
            self.cache.drop_states(self._kept_index(group), needed[group])

    def check_integrity(self, requests: Collection[RequestBlocks]) -> None:
        """Raises AssertionError unless every block, slot and node is held as often as is counted."""
        self.cache.check_integrity()
        for group, pool in enumerate(self.pools):
            held = Counter(chain.from_iterable(request.tables[group].held for request in requests))
            if pool not in self.cache.kept:
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
    if pool in cache.kept:
        index = cache.kept.index(pool)
        held.update(chain.from_iterable(kept[index] for kept in cache.snapshots.values()))
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
