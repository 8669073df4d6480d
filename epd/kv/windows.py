"""Lists the blocks of a request in layers with a sliding window: those behind the window are freed.

A token attends the last `window` tokens, itself included. What no later token attends has no block, and what
is far ahead of the written tokens has none yet, so a long prompt takes no more blocks than a short one:

    tokens           0 ........... | window | written .)| num_ahead |
    block table      [ -1 ][ -1 ][ 4 ][ 7 ][ 2 ][ 9 ]
                       FREED ^

A prompt that begins alike needs the blocks of the window at the place where it goes on. They are kept at
some places, as recurrent states are: see `epd/kv/prefix_cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from epd.kv.block_pool import FREED, BlockPool, BlockTable
from epd.types import ceil_div

_PLENTY = 2**62


def first_kept(window: int, num_tokens: int, block_size: int) -> int:
    """Returns the first block of a table that a token after `num_tokens` tokens attends."""
    return max(num_tokens - window + 1, 0) // block_size


class WindowTable(BlockTable):
    """Lists the blocks of one request in one layer group with a window.

    num_ahead: tokens that are written at once at the most, for which it has room beforehand.
    """

    __slots__ = ("num_ahead", "window")

    def __init__(self, pool: BlockPool, block_size: int, window: int, num_ahead: int) -> None:
        super().__init__(pool, block_size)
        self.window = window
        self.num_ahead = num_ahead

    @property
    def usable_room(self) -> int:
        """Returns room for any number of tokens where there is room for those that are written at once."""
        return _PLENTY if self.room >= self.num_ahead else self.room

    def num_missing(self, added: int, arriving: int = 0) -> int:
        num_written = max(self.num_tokens, arriving)
        stop = min(self.num_tokens + added, num_written + self.num_ahead)
        start = max(len(self.blocks), first_kept(self.window, arriving, self.block_size))
        return max(ceil_div(stop, self.block_size) - start, 0)

    def num_added_by_fork(self, added: int) -> int:
        return super().num_added_by_fork(min(added, self.num_ahead))

    def await_tokens(self, num_tokens: int) -> None:
        """Leaves out the blocks that are behind the window once `num_tokens` tokens have arrived."""
        self._free_behind(num_tokens)
        num_skipped = first_kept(self.window, num_tokens, self.block_size) - len(self.blocks)
        if num_skipped > 0:
            self.blocks += [FREED] * num_skipped
            self.num_freed = len(self.blocks)

    def write(self, num_tokens: int) -> None:
        """Records tokens as written, those that have no block too, and frees the blocks behind the window."""
        stop = self.num_tokens + num_tokens
        self.num_tokens = max(self.num_tokens, self.num_freed * self.block_size)
        super().write(stop - self.num_tokens)
        self._free_behind(stop)

    def _free_behind(self, num_tokens: int) -> None:
        stop = min(first_kept(self.window, num_tokens, self.block_size), len(self.blocks))
        if stop > self.num_freed:
            self.pool.release(*self.blocks[self.num_freed : stop])
            self.blocks[self.num_freed : stop] = [FREED] * (stop - self.num_freed)
            self.num_freed = stop

    @property
    def kept(self) -> tuple[int, ...]:
        """Lists the whole blocks that are written, which the next token attends."""
        return tuple(self.blocks[self.num_freed : self.num_whole])

    def share_window(self, blocks: Sequence[int], num_blocks: int) -> None:
        """Begins with `num_blocks` whole blocks of written tokens, the last of which are these."""
        self.share([*[FREED] * (num_blocks - len(blocks)), *blocks])

    def check_integrity(self) -> None:
        """Raises AssertionError as a table does, for blocks behind the window, or a window without some."""
        super().check_integrity()
        first = first_kept(self.window, self.num_tokens, self.block_size)
        if self.num_tokens and (self.num_freed != first or FREED in self.blocks[self.num_freed :]):
            raise AssertionError(f"{self.num_freed} blocks are freed, {first} are behind the window")
