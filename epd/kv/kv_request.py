"""Keeps the KV cache holdings of one request, and its shortage when it did not fit. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from epd.kv.block_pool import BlockTable
from epd.kv.kv_identity import TokenIdentity
from epd.kv.prefix_cache import CachedBlock
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
        tables: list[BlockTable],
        identity: TokenIdentity,
        is_shareable: bool,
        state: StateSlots | None = None,
    ) -> None:
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

    @property
    def kept(self) -> tuple[tuple[int, ...], ...] | None:
        """Returns what a prompt that begins with the written tokens needs beside their blocks, if it is here.

        The slot of the recurrent state, if there is any, then the blocks of each window.
        """
        windows = tuple(table.kept for table in self.windows)
        if self.state is None:
            return windows
        return None if self.state.current is None else ((self.state.current,), *windows)

    def take_kept(self, kept: tuple[tuple[int, ...], ...]) -> None:
        """Begins with what another request has kept after the blocks that are shared."""
        if self.state is not None:
            self.state.share(kept[0][0])
        windows = self.windows
        for table, blocks in zip(windows, kept[len(kept) - len(windows) :], strict=True):
            table.share_window(blocks, self.tables[0].num_whole)

    def blocks_at(self, index: int) -> tuple[int, ...]:
        """Returns the block at a place of each table without a window."""
        return tuple(table.blocks[index] for table in self.tables if not isinstance(table, WindowTable))
