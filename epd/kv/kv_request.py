"""Keeps the KV cache holdings of one request, and its shortage when it did not fit. No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from epd.kv.block_pool import BlockTable
from epd.kv.kv_identity import TokenIdentity
from epd.kv.prefix_cache import CachedBlock, PrefixCache
from epd.kv.states import StateSlots
from epd.kv.windows import WindowTable


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
            self._cache.unpin(node)
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
            self._cache.keep_state(self.path[-1], kept)

    def use_state(self) -> None:
        """Begins with what another request has kept after the blocks that are shared."""
        kept, windows = self._cache.use_state(self.path[-1]), self.windows
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
        self._cache.add_partial(parent, rows, self._blocks_at(index))

    def _blocks_at(self, index: int) -> tuple[int, ...]:
        """Returns the block at a place of each table without a window."""
        return tuple(table.blocks[index] for table in self.tables if not isinstance(table, WindowTable))
