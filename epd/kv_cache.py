"""Which KV blocks each request has, shares and may reuse: the policy of the paged cache, no tensors.

    table of a request    [ block ][ block ][ block ][ block ]
    tokens                 0 ........ written .....)|  room  )
                                       num_tokens --^        ^-- allocated

Blocks that are written in full are shared: with the prefix cache, with forks, with requests that begin alike. A
block that is still to be written is held by one table only. A layer group is a run of decoder layers that share
a block table; all groups of a request grow by the same tokens, and `num_tokens` counts those of group 0 unless
another is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from epd.block_pool import BlockPool
from epd.kv_identity import TokenIdentity
from epd.prefix_cache import CachedBlock, PrefixCache, PrefixMatch


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """num_blocks: of each layer group. block_size: tokens."""

    num_blocks: tuple[int, ...]
    block_size: int

    def __post_init__(self) -> None:
        if not self.num_blocks or min(self.num_blocks) < 1 or self.block_size < 1:
            raise ValueError(f"a KV cache needs at least 1 layer group of 1 block of 1 token, got {self}")


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `num_tokens` slots of block `source` are to be copied to block `target`.

    Copies are carried out in the order in which they were given, before anything else is written to the pool:
    a source may be given out again at once.
    """

    layer_group: int
    source: int
    target: int
    num_tokens: int


class _Table:
    """What one request has. `capacity`: tokens of group 0 that there is room for in all groups."""

    __slots__ = ("blocks", "capacity", "identity", "is_shareable", "next_share", "num_tokens", "path")

    def __init__(self, num_groups: int, identity: TokenIdentity, is_shareable: bool) -> None:
        self.identity = identity
        self.is_shareable = is_shareable
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_tokens = [0] * num_groups
        self.path: list[CachedBlock] = []  # nodes of the leading whole blocks, pinned
        self.capacity = 0
        self.next_share = 0  # tokens with which the next block is whole

    def refresh(self, block_size: int) -> None:
        """What follows from the blocks, lengths and path."""
        room = (
            len(blocks) * block_size - num for blocks, num in zip(self.blocks, self.num_tokens, strict=True)
        )
        self.capacity = self.num_tokens[0] + min(room)
        self.next_share = (len(self.path) + 1) * block_size


class KVCacheManager:
    """Block tables of all requests, and the prefix cache under them; idle cached blocks count as room."""

    def __init__(self, spec: KVCacheSpec, *, enable_prefix_caching: bool = True) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pools = [BlockPool(num_blocks) for num_blocks in spec.num_blocks]
        self._cache = PrefixCache(self._pools, spec.block_size)
        self._tables: dict[str, _Table] = {}

    # Questions

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def num_cached(self, identity: TokenIdentity, max_tokens: int | None = None) -> int:
        """Tokens that `open` would find, if there is room for a copy."""
        if not self.enable_prefix_caching:
            return 0
        match = self._cache.match(identity, len(identity) if max_tokens is None else max_tokens)
        return len(match.path) * self.block_size + match.num_partial

    def num_tokens(self, request_id: str, layer_group: int = 0) -> int:
        """Tokens that are written."""
        return self._tables[request_id].num_tokens[layer_group]

    def block_table(self, request_id: str, layer_group: int = 0) -> Sequence[int]:
        """Ids of the request's blocks, those still to be written included; the table itself: do not keep it."""
        return self._tables[request_id].blocks[layer_group]

    def num_free_blocks(self, layer_group: int = 0) -> int:
        """Blocks that can be had: free ones, and cached ones that nobody uses."""
        return self._pools[layer_group].num_free + self._cache.num_idle

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1, in the fullest layer group."""
        shares = (self.num_free_blocks(group) / num for group, num in enumerate(self.spec.num_blocks))
        return 1 - min(shares)

    @property
    def num_evictions(self) -> int:
        """Cached blocks that had to go so far."""
        return self._cache.num_evictions

    def can_allocate(self, request_id: str, num_tokens: int) -> bool:
        """Whether `allocate` would find room now."""
        table = self._tables[request_id]
        return num_tokens <= table.capacity or self._has_room(self._missing(table, num_tokens))

    def can_fork(self, request_id: str) -> bool:
        """Whether `fork` would find room now."""
        return self._has_room(self._num_tails(self._tables[request_id]))

    # Changes

    def open(
        self, request_id: str, identity: TokenIdentity, *, max_cached: int, is_shareable: bool = True
    ) -> list[BlockCopy]:
        """Starts a table with what is cached of the prompt, at most `max_cached` tokens; `num_tokens` tells.

        Whole blocks are shared; part of a block is copied, unless there is no room for the copy. A request
        whose blocks will be written again, since its layers are to be pruned, is opened with is_shareable=False.
        Raises ValueError for a request that is open already.
        """
        if request_id in self._tables:
            raise ValueError(f"request '{request_id}' has a block table already; free it first")
        is_shareable = is_shareable and self.enable_prefix_caching
        table = _Table(len(self._pools), identity, is_shareable)
        self._tables[request_id] = table
        copies: list[BlockCopy] = []
        if is_shareable:
            match = self._cache.match(identity, max_cached)
            for node in match.path:
                self._pin(table, node)
                self._share(table, node.blocks)
            table.num_tokens = [len(match.path) * self.block_size] * len(self._pools)
            copies = self._copy_partial(table, match)
        table.refresh(self.block_size)
        return copies

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Room for tokens [0, num_tokens). Evicts what it must; a table only grows.

        Raises ValueError, and changes nothing, when there is no room: see `can_allocate`.
        """
        table = self._tables[request_id]
        if num_tokens <= table.capacity:
            return
        missing = self._missing(table, num_tokens)
        if not self._has_room(missing):
            raise ValueError(
                f"request '{request_id}' needs {missing} more blocks for {num_tokens} tokens, "
                f"{self._all_free()} can be had; free a request first"
            )
        for blocks, fresh in zip(table.blocks, self._take(missing, table), strict=True):
            blocks.extend(fresh)
        table.refresh(self.block_size)

    def commit(self, request_id: str, identity: TokenIdentity, num_tokens: int) -> None:
        """Tokens [0, num_tokens) are written; whole blocks become shareable.

        identity: of all known tokens, more than num_tokens or as many; kept to be read again by `free`.
        Raises ValueError for fewer tokens than before, or more than there is room for.
        """
        table = self._tables[request_id]
        lengths = table.num_tokens
        added = num_tokens - lengths[0]
        if added < 0 or num_tokens > table.capacity:
            raise ValueError(
                f"request '{request_id}' cannot commit {num_tokens} tokens: {lengths[0]} are written and "
                f"there is room for {table.capacity}; allocate first, or truncate"
            )
        for group in range(len(lengths)):
            lengths[group] += added
        table.identity = identity
        if num_tokens >= table.next_share and table.is_shareable:
            self._share_whole_blocks(table)

    def fork(self, request_id: str, child_id: str) -> list[BlockCopy]:
        """A child with the same written tokens: whole blocks are shared, the one in part is copied.

        Raises ValueError, and changes nothing, when there is no room for the copy or the child exists.
        """
        parent = self._tables[request_id]
        tails = self._num_tails(parent)
        if child_id in self._tables or not self._has_room(tails):
            raise ValueError(
                f"request '{request_id}' cannot be forked as '{child_id}': {tails} blocks are needed, "
                f"{self._all_free()} can be had; use another name or free a request first"
            )
        child = _Table(len(self._pools), parent.identity, parent.is_shareable)
        self._tables[child_id] = child
        child.num_tokens = list(parent.num_tokens)
        for node in parent.path:
            self._pin(child, node)
        for group, blocks in enumerate(parent.blocks):
            whole = blocks[: parent.num_tokens[group] // self.block_size]
            self._share_in(group, child, whole)
        copies = []
        for group, fresh in enumerate(self._take(tails, child)):
            for target in fresh:
                copies.append(self._tail_copy(parent, group, target))
                child.blocks[group].append(target)
        child.refresh(self.block_size)
        return copies

    def truncate(self, request_id: str, num_tokens: int, layer_group: int | None = None) -> list[BlockCopy]:
        """Gives blocks back past `num_tokens`, of all layer groups or one; tokens past it are forgotten.

        With `layer_group`, `num_tokens` counts that group's tokens; a request whose groups differ in length is
        not shareable any more. A block that is cut in the middle and has other holders is copied.
        Raises ValueError, and changes nothing, when there is no room for such a copy or a length is negative.
        """
        table = self._tables[request_id]
        kept = self._kept_tokens(table, num_tokens, layer_group)
        if min(kept) < 0:
            raise ValueError(f"request '{request_id}' of {table.num_tokens} tokens cannot be cut to {kept}")
        needed = [int(self._is_cut_while_shared(table, group, num)) for group, num in enumerate(kept)]
        if not self._has_room(needed):
            raise ValueError(
                f"request '{request_id}' needs {needed} blocks to be cut to {kept} tokens, {self._all_free()} "
                f"can be had; keep whole blocks or free a request first"
            )
        copies = [
            self._replace_tail(table, group, kept[group], target)
            for group, fresh in enumerate(self._take(needed, table))
            for target in fresh
        ]
        for group, num in enumerate(kept):
            self._cut(table, group, num)
        self._unpin(table, max(table.num_tokens) // self.block_size)
        table.is_shareable &= min(table.num_tokens) == max(table.num_tokens)
        table.refresh(self.block_size)
        return copies

    def free(self, request_id: str) -> None:
        """The request is over: blocks that nobody else holds are free, or idle if they are cached.

        What is written of its last block stays findable too.
        """
        table = self._tables.pop(request_id)
        if table.is_shareable:
            self._keep_tail(table)
        for group, blocks in enumerate(table.blocks):
            for block in reversed(blocks):
                self._pools[group].release(block)
        self._unpin(table, 0)

    def clear_idle(self) -> None:
        """Forgets all cached blocks that nobody uses."""
        self._cache.evict(self._cache.num_idle)

    # Room

    def _missing(self, table: _Table, num_tokens: int) -> list[int]:
        """Blocks to be added in each layer group until there is room for so many tokens of group 0."""
        added = num_tokens - table.num_tokens[0]
        return [
            max(-(-(num + added) // self.block_size) - len(blocks), 0)
            for blocks, num in zip(table.blocks, table.num_tokens, strict=True)
        ]

    def _num_tails(self, table: _Table) -> list[int]:
        """In each layer group 1 if a block is written in part, or else 0."""
        return [min(num % self.block_size, 1) for num in table.num_tokens]

    def _all_free(self) -> list[int]:
        return [self.num_free_blocks(group) for group in range(len(self._pools))]

    def _has_room(self, needed: Sequence[int]) -> bool:
        idle = self._cache.num_idle
        return all(num <= pool.num_free + idle for num, pool in zip(needed, self._pools, strict=True))

    def _take(self, needed: Sequence[int], table: _Table) -> list[list[int]]:
        """Fresh blocks in each layer group, to follow the table's last; there must be room."""
        short = max(num - pool.num_free for num, pool in zip(needed, self._pools, strict=True))
        self._cache.evict(max(short, 0))
        return [
            pool.take(num, blocks[-1] if blocks else None)
            for pool, num, blocks in zip(self._pools, needed, table.blocks, strict=True)
        ]

    def _kept_tokens(self, table: _Table, num_tokens: int, layer_group: int | None) -> list[int]:
        """Tokens that there is to be room for in each layer group after a cut."""
        if layer_group is None:
            cut = table.num_tokens[0] - num_tokens
            return [num - cut for num in table.num_tokens]
        kept = [len(blocks) * self.block_size for blocks in table.blocks]
        kept[layer_group] = num_tokens
        return kept

    def _is_cut_while_shared(self, table: _Table, group: int, num_tokens: int) -> bool:
        """Whether a cut leaves written tokens in part of a block that others hold too."""
        if num_tokens >= table.num_tokens[group] or num_tokens % self.block_size == 0:
            return False
        return self._pools[group].references(table.blocks[group][num_tokens // self.block_size]) > 1

    def _replace_tail(self, table: _Table, group: int, num_tokens: int, target: int) -> BlockCopy:
        """Gives the table a block of its own instead of the shared one that a cut to `num_tokens` ends in."""
        index, rest = divmod(num_tokens, self.block_size)
        source = table.blocks[group][index]
        table.blocks[group][index] = target
        self._pools[group].release(source)
        return BlockCopy(group, source, target, rest)

    def _cut(self, table: _Table, group: int, num_tokens: int) -> None:
        """Releases the blocks past `num_tokens`, the last first."""
        blocks = table.blocks[group]
        keep = -(-num_tokens // self.block_size)
        for block in reversed(blocks[keep:]):
            self._pools[group].release(block)
        del blocks[keep:]
        table.num_tokens[group] = min(table.num_tokens[group], num_tokens)

    # Sharing

    def _pin(self, table: _Table, node: CachedBlock) -> None:
        self._cache.pin(node)
        table.path.append(node)

    def _unpin(self, table: _Table, keep: int) -> None:
        """Lets go of the nodes past the first `keep`, the deepest first: see `epd/prefix_cache.py`."""
        for node in reversed(table.path[keep:]):
            self._cache.unpin(node)
        del table.path[keep:]

    def _share(self, table: _Table, blocks: Sequence[int]) -> None:
        for group, block in enumerate(blocks):
            self._share_in(group, table, [block])

    def _share_in(self, group: int, table: _Table, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._pools[group].share(block)
        table.blocks[group].extend(blocks)

    def _copy_partial(self, table: _Table, match: PrefixMatch) -> list[BlockCopy]:
        """Copies the cached part of one more block into a block of the table's own, if there is room."""
        source = match.partial
        if source is None:
            return []
        spare = 1 if self._cache.is_idle(source) else 0  # it must not be evicted for its own copy
        if not self._has_room([1 + spare] * len(self._pools)):
            return []
        self._cache.touch(source)
        copies = []
        for group, (target,) in enumerate(self._take([1] * len(self._pools), table)):
            table.blocks[group].append(target)
            table.num_tokens[group] += match.num_partial
            copies.append(BlockCopy(group, source.blocks[group], target, match.num_partial))
        return copies

    def _tail_copy(self, table: _Table, group: int, target: int) -> BlockCopy:
        whole, rest = divmod(table.num_tokens[group], self.block_size)
        return BlockCopy(group, table.blocks[group][whole], target, rest)

    def _node_blocks(self, table: _Table, index: int) -> tuple[int, ...]:
        return tuple(blocks[index] for blocks in table.blocks)

    def _share_whole_blocks(self, table: _Table) -> None:
        """Puts the blocks that have become whole into the prefix cache.

        Where another request was first with the same tokens, the table keeps its own block and builds on the
        other's node: blocks that are being read or sent are never exchanged.
        """
        size, path = self.block_size, table.path
        while (len(path) + 1) * size <= table.num_tokens[0]:
            index = len(path)
            key = table.identity.row_bytes(index * size, (index + 1) * size)
            parent = path[-1] if path else self._cache.root
            self._pin(table, self._cache.child(parent, key, self._node_blocks(table, index)))
        table.next_share = (len(path) + 1) * size

    def _keep_tail(self, table: _Table) -> None:
        whole, rest = divmod(table.num_tokens[0], self.block_size)
        if not rest or len(table.identity) < table.num_tokens[0]:
            return
        key = table.identity.row_bytes(whole * self.block_size, table.num_tokens[0])
        parent = table.path[-1] if table.path else self._cache.root
        self._cache.add_partial(parent, key, self._node_blocks(table, whole))

    def check_integrity(self) -> None:
        """Raises AssertionError unless each block is free or held as often as is counted, and what is still to
        be written has one holder."""
        for pool in self._pools:
            pool.check_integrity()
        self._cache.check_integrity()
        self._check_references()
        pins = Counter(node for table in self._tables.values() for node in table.path)
        for node in self._cache.nodes():
            _require(node.num_pins == pins[node], f"{node.num_pins} pins are counted, {pins[node]} are held")
        for request_id, table in self._tables.items():
            self._check_table(request_id, table)

    def _check_references(self) -> None:
        for group, pool in enumerate(self._pools):
            holders = Counter(block for table in self._tables.values() for block in table.blocks[group])
            holders.update(node.blocks[group] for node in self._cache.nodes())
            for block in range(pool.num_blocks):
                counted = pool.references(block)
                _require(
                    counted == holders[block], f"block {block}: {counted} counted, {holders[block]} hold it"
                )

    def _check_table(self, request_id: str, table: _Table) -> None:
        size, parent = self.block_size, self._cache.root
        for index, node in enumerate(table.path):
            _require(node.parent is parent, f"{request_id}: its path is not a path")
            same = node.key == table.identity.row_bytes(index * size, (index + 1) * size)
            _require(same or not table.is_shareable, f"{request_id}: other tokens than its node's")
            parent = node
        _require(len(table.path) <= max(table.num_tokens) // size, f"{request_id}: nodes past its tokens")
        for group, blocks in enumerate(table.blocks):
            whole = table.num_tokens[group] // size
            _require(len(set(blocks)) == len(blocks), f"{request_id}: a block twice")
            _require(table.num_tokens[group] <= len(blocks) * size, f"{request_id}: more tokens than room")
            for block in blocks[whole:]:
                shared = self._pools[group].references(block) != 1
                _require(
                    not shared, f"{request_id}: block {block} is still to be written and has other holders"
                )
        derived = (table.capacity, table.next_share)
        table.refresh(size)
        _require(derived == (table.capacity, table.next_share), f"{request_id}: stale {derived}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
