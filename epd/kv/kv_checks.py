"""Checks the conservation law of a KV cache: what is held is what is counted, of every kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain

from epd.errors import require
from epd.kv.block_pool import BlockPool
from epd.kv.kv_request import RequestBlocks
from epd.kv.prefix_cache import PrefixCache


def check_cache(
    pools: Sequence[BlockPool],
    states: BlockPool | None,
    cache: PrefixCache,
    requests: Collection[RequestBlocks],
) -> None:
    """Raises AssertionError unless every block, slot and node is held as often as is counted.

    pools: of each layer group. states: slots of recurrent states, if there are any.
    """
    cache.check_integrity()
    for group, pool in enumerate(pools):
        held = Counter(chain.from_iterable(request.tables[group].held for request in requests))
        if pool not in cache.kept:
            held.update(node.blocks[group] for node in cache.nodes())
        _check_pool(pool, held, cache)
    if states is not None:
        slots = (request.state.held for request in requests if request.state is not None)
        _check_pool(states, Counter(chain.from_iterable(slots)), cache)
    pins = Counter(node for request in requests for node in request.path)
    for node in cache.nodes():
        if node.num_pins != pins[node]:
            raise AssertionError(f"{node.num_pins} pins are counted, {pins[node]} are held")
    for request in requests:
        _check_request(request, cache)


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
