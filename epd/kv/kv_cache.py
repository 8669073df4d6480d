"""Decides which KV blocks each request has, shares and may reuse: the policy of the paged cache, no tensors.

Blocks that are written in full are shared: with the prefix cache, with forks, with requests that begin
alike. A block that is still to be written is held by one table only. A layer group is a run of decoder
layers that share a block table. All groups of a request grow by the same tokens; `num_tokens` counts those
of group 0 where no other is named.

What layers keep of a sequence is of three kinds:

    full attention     keys and values of each token, in blocks
    sliding window     those of the last tokens, in blocks that are freed behind it: see `epd/kv/windows.py`
    recurrent state    one state of all tokens so far, in a slot: see `epd/kv/block_pool.py`

A model of other kinds than the first finds a cached prefix only up to a block after which its state and the
blocks of its windows were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epd.kv.block_pool import BlockCopy, BlockPool, BlockTable
from epd.kv.kv_room import KVCacheSpec, KVRoom, RequestBlocks, Shortage
from epd.kv.prefix_cache import PrefixMatch, TokenIdentity
from epd.kv.windows import WindowTable
from epd.types import ceil_div


class KVCacheManager:
    """Keeps block tables of all requests, and the prefix cache under them; idle cached blocks count as room.

    Methods raise KeyError for a request that is not open.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        enable_prefix_caching: bool = True,
        make_pool: Callable[[int], BlockPool] = BlockPool,
    ) -> None:
        """make_pool: makes the pool of a layer group from its number of blocks."""
        self.spec = spec
        self.block_size = spec.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._room = KVRoom(spec, make_pool)
        self._cache = self._room.cache
        self._requests: dict[str, RequestBlocks] = {}

    # Questions: none of them changes anything.

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def num_cached(
        self, identity: TokenIdentity, max_tokens: int | None = None, *, awaits_state: bool = False
    ) -> int:
        """Returns how many tokens `open` would find, if there is room for a copy."""
        if not self.enable_prefix_caching:
            return 0
        max_tokens = len(identity) if max_tokens is None else max_tokens
        if awaits_state and self.spec.num_windows:
            return 0
        match = self._cache.match(identity, max_tokens, needs_state=not awaits_state)
        return len(match.path) * self.block_size + match.num_partial

    def num_tokens(self, request_id: str, layer_group: int = 0) -> int:
        """Returns how many tokens are written; of a decode, those of its last block may be missing."""
        return self._requests[request_id].tables[layer_group].num_tokens

    def block_table(self, request_id: str, layer_group: int = 0) -> Sequence[int]:
        """Returns the ids of the request's blocks, those still unwritten too. Not a copy: do not keep it.

        What lies before a window is FREED.
        """
        return self._requests[request_id].tables[layer_group].blocks

    def num_held_blocks(self, request_id: str, layer_group: int = 0) -> int:
        """Returns how many blocks the request holds."""
        table = self._requests[request_id].tables[layer_group]
        return len(table.blocks) - table.num_freed

    def num_free_blocks(self, layer_group: int = 0) -> int:
        """Returns how many blocks are available: free ones, and cached ones that no request uses."""
        return self._room.num_free(layer_group)

    def current_state(self, request_id: str) -> int | None:
        """Returns the slot with the state of the written tokens; None without any."""
        state = self._requests[request_id].state
        return None if state is None else state.current

    def next_state(self, request_id: str) -> int | None:
        """Returns the slot that the state after the next tokens goes to; None before `allocate`."""
        state = self._requests[request_id].state
        return None if state is None else state.following

    def has_states(self, count: int) -> bool:
        """Returns whether this many slots are available: free ones, and snapshots that nobody else holds."""
        return self._room.has_states(count)

    @property
    def usage(self) -> float:
        """Returns the share of the blocks that requests hold, 0 to 1, in the fullest layer group."""
        free = zip(self._room.all_free(), self.spec.num_blocks, strict=True)
        return 1 - min(num_free / num_blocks for num_free, num_blocks in free)

    @property
    def num_evictions(self) -> int:
        """Returns the number of cached blocks of each layer group that were evicted so far."""
        return self._cache.num_evictions

    def can_allocate(self, request_id: str, num_tokens: int, *, arriving: int = 0) -> bool:
        """Returns whether `allocate` would find room now."""
        request = self._requests[request_id]
        if num_tokens <= request.capacity:
            return True
        return self._room.has(request.num_missing(num_tokens, arriving), request.num_missing_states)

    def can_fork(self, request_id: str, num_tokens: int = 0) -> bool:
        """Returns whether `fork`, then `allocate` of `num_tokens` for the child, would find room now."""
        parent = self._requests[request_id]
        num_states = int(num_tokens > parent.num_tokens)
        return self._room.has(parent.num_added_by_fork(num_tokens), num_states)

    def shortage(self, request_id: str, num_tokens: int) -> Shortage:
        """Returns why `num_tokens` tokens of an open request found no room: see `may_fit`."""
        request = self._requests[request_id]
        num_shared = sum(node.num_pins > 1 for node in request.path)
        missing = zip(request.tables, request.num_missing(num_tokens), strict=True)
        # What windows lack is looked up again each time: their blocks are held for a while alone.
        blocks = tuple(
            0 if isinstance(table, WindowTable) else len(table.blocks) + count - num_shared
            for table, count in missing
        )
        return Shortage(blocks, self._cache.num_pinned, request.num_missing_states)

    def may_fit(self, shortage: Shortage) -> bool:
        """Returns whether opening the request again could find room; its tokens are not looked at.

        Cached blocks that were not held count as free then and now. Blocks that others have taken since, new
        ones too, may all be the request's: each counts as one less to find.
        """
        found = self._cache.num_pinned - shortage.num_pinned
        pairs = zip(shortage.blocks, self._room.all_free(), strict=True)
        has_blocks = all(needed <= num_free + found for needed, num_free in pairs)
        return has_blocks and self.has_states(shortage.num_states)

    def is_written(self, request_id: str) -> bool:
        """Returns whether all tokens of the request are in its blocks, so that no copy is pending."""
        return all(table.is_written for table in self._requests[request_id].tables)

    # Changes

    def open(
        self,
        request_id: str,
        identity: TokenIdentity,
        *,
        max_cached: int,
        is_shareable: bool = True,
        awaits_state: bool = False,
        num_ahead: int = 0,
    ) -> list[BlockCopy]:
        """Starts a request with the cached part of its prompt, at most `max_cached` tokens: see `num_tokens`.

        Whole blocks are shared; part of a block is copied, unless there is no room for the copy. With
        is_shareable=False nothing is shared either way: for a request whose layers will be pruned, so that
        its blocks are written again. With awaits_state=True blocks are shared without their recurrent state:
        that comes from elsewhere before the next commit, which must be of further tokens. With windows
        nothing is shared then.
        num_ahead: tokens of it that are computed at once, if they may be more than `KVCacheSpec.num_ahead`.
        Raises ValueError for a request that is open already.
        """
        request = self._new_request(request_id, identity, is_shareable and self.enable_prefix_caching)
        for table in request.windows:
            table.num_ahead = max(table.num_ahead, num_ahead)
        max_cached = 0 if awaits_state and request.windows else max_cached
        copies: list[BlockCopy] = []
        if request.is_shareable:
            match = self._cache.match(identity, max_cached, needs_state=not awaits_state)
            request.share_path(match.path)
            if request.keeps_all:
                copies = self._copy_partial(request, match)
            elif request.path and awaits_state and request.state is not None:
                request.state.is_awaited = True
            elif request.path:
                request.use_state()
        request.refresh()
        return copies

    def allocate(self, request_id: str, num_tokens: int, *, arriving: int = 0) -> None:
        """Makes room for tokens [0, num_tokens). Evicts if necessary; never shrinks.

        In layers with a window it is room for the next `num_ahead` of them.
        arriving: tokens that come from elsewhere and are committed at once; what is behind a window then
        needs no room.
        Raises ValueError, and changes nothing, when there is no room: see `can_allocate`.
        """
        request = self._requests[request_id]
        if num_tokens <= request.capacity:
            return
        missing, num_states = request.num_missing(num_tokens, arriving), request.num_missing_states
        lacks = any(count > table.pool.num_free for table, count in zip(request.tables, missing, strict=True))
        if lacks or num_states:
            purpose = f"room for {num_tokens} tokens of request '{request_id}'"
            self._room.make(missing, purpose, num_states)
        for window in request.windows:
            window.await_tokens(max(arriving, window.num_tokens))
        for table, count in zip(request.tables, missing, strict=True):
            table.take(count)
        if request.state is not None:
            request.state.take()
        request.refresh()

    def commit(
        self, request_id: str, identity: TokenIdentity, num_tokens: int, *, keeps_state: bool = False
    ) -> None:
        """Records tokens [0, num_tokens) as written; whole blocks become shareable.

        identity: of these tokens, and maybe of more; it is kept, and read again by `free`.
        keeps_state: whether a prompt that begins alike may begin with the recurrent state of these tokens;
        it needs whole blocks.
        Raises ValueError for fewer tokens than before, or more than are known or have room.
        """
        request = self._requests[request_id]
        added = num_tokens - request.tables[0].num_tokens
        if added < 0 or num_tokens > request.capacity or num_tokens > len(identity):
            raise ValueError(
                f"request '{request_id}' cannot commit {num_tokens} tokens: {request.num_tokens} are written,"
                f" {request.capacity} have room, {len(identity)} are known; allocate or truncate first"
            )
        for table in request.tables:
            table.write(added)
        request.identity = identity
        if request.state is not None and added:
            request.state.advance()
        if not request.keeps_all:
            request.refresh()
        if num_tokens >= request.next_share and request.is_shareable:
            request.share_whole_blocks()
        if keeps_state:
            request.keep_state()

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        """Records copies that have been carried out."""
        for copy in copies:
            self._room.pools[copy.layer_group].write(copy.target, 0, copy.num_tokens)

    def fork(self, request_id: str, child_id: str) -> list[BlockCopy]:
        """Returns a child with the same written tokens: whole blocks are shared, the one in part is copied.

        Raises ValueError, and changes nothing, when there is no room for the copy or the child exists.
        """
        parent = self._requests[request_id]
        needed = parent.num_added_by_fork()
        self._check_new(child_id)
        self._room.make(needed, f"the copy for a fork of request '{request_id}'")
        child = self._new_request(child_id, parent.identity, parent.is_shareable)
        child.pin(parent.path)
        for table, other in zip(child.windows, parent.windows, strict=True):
            table.num_ahead = other.num_ahead
        current = self.current_state(request_id)
        if child.state is not None and current is not None:
            child.state.share(current)
        copies = []
        for group, (old, new) in enumerate(zip(parent.tables, child.tables, strict=True)):
            new.share(old.blocks[: old.num_whole])
            if needed[group]:
                copies.append(_own_copy(group, new, old.blocks[old.num_whole], old.num_tokens))
        child.refresh()
        return copies

    def restore(self, identity: TokenIdentity, start: int, stop: int) -> list[tuple[int, ...]] | None:
        """Puts tokens [start, stop), which were kept elsewhere, into the prefix cache behind [0, start).

        start: in whole blocks. Returns the ids of the blocks, of each one by layer group, to be written at
        once; None, and changes nothing, where there is no room, [0, start) is not cached any more, or a model
        keeps more of a prompt than keys and values of all tokens.
        """
        if self.spec.keeps_states:
            return None
        path = self._cache.match(identity, start, needs_state=False).path
        num_blocks = ceil_div(stop - start, self.block_size)
        # What it comes behind must not be evicted for it.
        num_idle = sum(map(self._cache.is_idle, path))
        if len(path) * self.block_size != start or not self._room.has(
            [num_blocks + num_idle] * len(self._room.pools)
        ):
            return None
        for node in path:
            self._cache.pin(node)
        self._room.make([num_blocks] * len(self._room.pools), f"{stop - start} restored tokens")
        restored = list(zip(*(pool.take(num_blocks) for pool in self._room.pools), strict=True))
        self._room.add_restored(path, identity, stop, restored)
        for node in reversed(path):
            self._cache.unpin(node, identity.client)
        return restored

    def truncate(self, request_id: str, num_tokens: int, layer_group: int | None = None) -> list[BlockCopy]:
        """Frees blocks past `num_tokens`, of all layer groups or one; tokens past it are forgotten.

        With `layer_group`, `num_tokens` counts that group's tokens. A request whose groups differ in length
        is no longer shareable. A block that is cut in the middle and has other holders is copied.
        Raises ValueError, and changes nothing, when there is no room for such a copy, a length is negative,
        or tokens are forgotten that a recurrent state holds, or that have freed blocks behind a window.
        """
        request = self._requests[request_id]
        kept = self._kept(request, num_tokens, layer_group)
        if min(kept) < 0 or (not request.keeps_all and min(kept) < request.num_tokens):
            raise ValueError(f"request '{request_id}' of {request.lengths} tokens cannot be cut to {kept}")
        needed = [int(table.splits_shared(num)) for table, num in zip(request.tables, kept, strict=True)]
        self._room.make(needed, f"the copies for a cut of request '{request_id}' to {kept} tokens")
        copies = []
        for group, (table, num) in enumerate(zip(request.tables, kept, strict=True)):
            if needed[group]:
                index, rest = divmod(num, self.block_size)
                copies.append(BlockCopy(group, *table.replace(index), rest))
            table.cut(num)
        request.unpin(max(table.num_whole for table in request.tables))
        request.is_shareable &= len(set(request.lengths)) == 1
        request.refresh()
        return copies

    def keep_behind(self, request_id: str, num_tokens: Sequence[int]) -> None:
        """Frees the written blocks of a request that has copied what it keeps to the blocks behind them.

        num_tokens: of each layer group, how many are kept. The request is no longer shareable.
        Raises ValueError, and changes nothing, when the blocks behind have no room for so many, or the
        request has a recurrent state or a window.
        """
        request = self._requests[request_id]
        for table, num in zip(request.tables, num_tokens, strict=True):
            if not 0 <= num <= table.num_behind or not request.keeps_all:
                raise ValueError(
                    f"request '{request_id}' cannot keep {list(num_tokens)} tokens: {table.num_behind} have "
                    f"room behind the {table.num_tokens} written ones; allocate first"
                )
        for table, num in zip(request.tables, num_tokens, strict=True):
            table.drop_written(num)
        request.unpin(0)
        request.is_shareable = False
        request.refresh()

    def free(self, request_id: str) -> None:
        """Ends a request: its blocks become free unless others hold them, or idle if they are cached.

        The written part of its last block can still be found too.
        """
        request = self._requests.pop(request_id)
        if request.state is not None:
            request.state.release()
        if (
            request.keeps_all
            and request.is_shareable
            and all(table.has_written_partial for table in request.tables)
        ):
            request.share_partial()
        for table in request.tables:
            table.cut(0)
        request.unpin(0)

    def clear_idle(self) -> None:
        """Forgets all cached blocks that no request uses."""
        self._cache.evict(self._cache.num_idle)

    def _kept(self, request: RequestBlocks, num_tokens: int, layer_group: int | None) -> list[int]:
        """Returns for how many tokens each layer group keeps its blocks."""
        if layer_group is None:
            return [length + num_tokens - request.num_tokens for length in request.lengths]
        kept = [len(table.blocks) * self.block_size for table in request.tables]
        kept[layer_group] = num_tokens
        return kept

    def _check_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise ValueError(f"request '{request_id}' is open already; free it first")

    def _new_request(self, request_id: str, identity: TokenIdentity, is_shareable: bool) -> RequestBlocks:
        self._check_new(request_id)
        request = self._requests[request_id] = self._room.tables_for(identity, is_shareable)
        return request

    def _copy_partial(self, request: RequestBlocks, match: PrefixMatch) -> list[BlockCopy]:
        """Copies the cached part of one more block into a block of the request's own, if there is room."""
        source = match.partial
        if source is None:
            return []
        # An idle source counts as room, but must not be evicted for its own copy.
        spare = int(self._cache.is_idle(source))
        if not self._room.has([1 + spare] * len(self._room.pools)):
            return []
        self._cache.touch(source)
        self._room.make([1] * len(self._room.pools), "the copy of a cached block")
        num_tokens = request.num_tokens + match.num_partial
        return [
            _own_copy(group, table, source.blocks[group], num_tokens)
            for group, table in enumerate(request.tables)
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError unless all that is held is counted."""
        self._room.check_integrity(self._requests.values())


def _own_copy(group: int, table: BlockTable, source: int, num_tokens: int) -> BlockCopy:
    """Adds a fresh block, to which the part of `source` that makes `num_tokens` is to be copied."""
    table.take(1)
    table.num_tokens, num_copied = num_tokens, num_tokens - table.num_tokens
    return BlockCopy(group, source, table.blocks[-1], num_copied)
