"""Keeps the KV blocks of one layer group: which are free, how many hold the others, block tables, and states.

block table    [ 4 ][ 5 ][ 6 ][ 9 ]
tokens         0 .... written .)| room )
                   num_tokens --^

Layers with a recurrent state keep no tokens: all tokens before one are in a state of fixed size. A slot holds
the states of all such layers after some tokens of a sequence. What is written never changes. A pass reads one
slot and writes another, which is the current one once the pass is committed:

    slots of a sequence   | 4, current | 9, next |    commit ->    | 9, current |    allocate ->    | 9 | 4 |

So a pass can be repeated, and forks and cached prefixes hold a slot together: nothing is copied in a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import not_

import numpy as np
from numpy.typing import NDArray

from epd.types import ceil_div

# In the place of a block that a table has given up, or never had: always the first ones of a table.
FREED = -1


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Requests a copy of the first `num_tokens` slots of block `source` to block `target`.

    Copies are carried out in the order in which they were given, before anything else is written to the pool:
    a source may be given out again at once. A target counts as unwritten until
    `KVCacheManager.copied` records the copy.
    """

    layer_group: int
    source: int
    target: int
    num_tokens: int


class BlockPool:
    """Manages blocks 0 to num_blocks - 1 with reference counts; one without references is free.

    Tables tend to be ascending runs, which attention can read without gathering: fresh blocks continue the
    run they follow, and a new run starts where it leaves most room to itself and to the run before it:

        [ run A ]. . . . . . . [ run B ]            [ run A ]. . . [ new ]. . . [ run B ]

    A wide enough gap of blocks that were held before is preferred: pools take memory when it is first
    written, so that they do not grow with use.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._is_free = bytearray([1]) * num_blocks + bytearray(1)  # none after the last
        self._was_held = bytearray(num_blocks + 1)
        self._num_written = [0] * num_blocks

    def references(self, block: int) -> int:
        """Returns the reference count of the block; 0 is free."""
        return self._references[block]

    def num_written(self, block: int) -> int:
        """Returns how many leading slots of the block have been written since it was taken."""
        return self._num_written[block]

    def write(self, block: int, start: int, stop: int) -> None:
        """Records slots [start, stop) as written; they count once all before them are."""
        if start <= self._num_written[block] < stop:
            self._num_written[block] = stop

    def fill(self, blocks: Sequence[int], block_size: int) -> None:
        """Records blocks as written in full."""
        for start, stop in _runs(blocks):
            self._num_written[start:stop] = [block_size] * (stop - start)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Returns `count` fresh blocks, held once; they follow block `after` where those are free.

        Raises ValueError when fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks are needed, {self.num_free} are free; release some")
        taken: list[int] = []
        block = self.num_blocks if after is None else after + 1
        if count == 1 and self._is_free[block]:  # the next block of a run: most often, so without slices
            self._is_free[block], self._was_held[block] = 0, 1
            self._references[block], self._num_written[block] = 1, 0
            self.num_free -= 1
            return [block]
        while len(taken) < count:
            if not self._is_free[block]:
                block = self._start(count - len(taken))
            stop = block + count - len(taken)
            if (held := self._is_free.find(0, block, stop)) >= 0:
                stop = held
            self._is_free[block:stop] = bytes(stop - block)
            self._was_held[block:stop] = b"\x01" * (stop - block)
            self._references[block:stop] = [1] * (stop - block)
            self._num_written[block:stop] = [0] * (stop - block)
            self.num_free -= stop - block
            taken += range(block, stop)
            block = stop
        return taken

    def _start(self, count: int) -> int:
        """Returns where a run of `count` blocks, if it can be had, starts: mid-way in the widest gap."""
        if self.num_free <= count:
            return self._is_free.index(1)
        is_free = np.frombuffer(self._is_free, np.bool_)
        start, length = _widest_run(is_free & np.frombuffer(self._was_held, np.bool_))
        if length < count:
            start, length = _widest_run(is_free)
        return start + max(length - count, 0) // 2 if start else 0

    def share(self, block: int) -> None:
        """Adds a holder to the block. Raises ValueError for a free one."""
        if not self._references[block]:
            raise ValueError(f"block {block} is free and cannot be shared; take it")
        self._references[block] += 1

    def release(self, *blocks: int) -> None:
        """Takes one holder from each block; the last makes it free. Raises ValueError for a free one."""
        for start, stop in _runs(blocks):
            if self._references[start:stop] == [1] * (stop - start):
                self._references[start:stop] = [0] * (stop - start)
                self._is_free[start:stop] = b"\x01" * (stop - start)
                self.num_free += stop - start
            else:
                for block in range(start, stop):
                    self._release(block)

    def _release(self, block: int) -> None:
        if not self._references[block]:
            raise ValueError(f"block {block} is free already")
        self._references[block] -= 1
        if not self._references[block]:
            self._is_free[block] = 1
            self.num_free += 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free blocks are those without references."""
        free = bytes(map(not_, self._references))
        if self._is_free != free + b"\0" or sum(free) != self.num_free:
            raise AssertionError(f"{sum(free)} blocks have no references, {self.num_free} count as free")

    def check_holders(self, held: Mapping[int, int]) -> None:
        """Raises AssertionError unless blocks have the references that are held, and no other has any."""
        wrong = {block: self.references(block) for block in held if self.references(block) != held[block]}
        num_held = self.num_blocks - self.num_free
        if wrong or num_held != len(held):
            raise AssertionError(f"{num_held} blocks are not free, {len(held)} are held; counted: {wrong}")


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of runs of consecutive blocks, in order; most tables are one run.

    A long run may come in pieces: lengths are tried in halves and doubles, each compared at once.
    """
    done, length = 0, len(blocks)
    while done < len(blocks):
        start = blocks[done]
        while list(blocks[done : done + length]) != list(range(start, start + length)):
            length = (length + 1) // 2
        yield start, start + length
        done += length
        length = min(2 * length, len(blocks) - done)


def _widest_run(values: NDArray[np.bool_]) -> tuple[int, int]:
    """Returns start and length of the first of the longest runs of True; the last value is False."""
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    if values[0]:
        edges = np.concatenate(([0], edges))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    widest = int(lengths.argmax())
    return int(edges[2 * widest]), int(lengths[widest])


class BlockTable:
    """Lists the blocks of one request in one layer group. Unwritten tokens are in unshared blocks.

    num_freed: leading blocks that are FREED, of a table with a window: see `epd/kv/windows.py`.
    """

    __slots__ = ("block_size", "blocks", "num_freed", "num_tokens", "pool")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.num_freed = 0

    @property
    def room(self) -> int:
        """Returns the number of tokens that can still be written."""
        return len(self.blocks) * self.block_size - self.num_tokens

    @property
    def usable_room(self) -> int:
        """Returns how many tokens can be written before blocks must be taken."""
        return self.room

    @property
    def held(self) -> list[int]:
        """Lists the blocks that it holds."""
        return self.blocks[self.num_freed :]

    @property
    def num_behind(self) -> int:
        """Returns the number of tokens that fit into the blocks in which none is written."""
        return self.room // self.block_size * self.block_size

    @property
    def num_whole(self) -> int:
        """Returns the number of blocks that are written in full."""
        return self.num_tokens // self.block_size

    def num_missing(self, added: int, arriving: int = 0) -> int:  # noqa: ARG002 # for a table with a window
        """Returns how many blocks `added` more tokens need beyond those of the table.

        arriving: tokens that are written together, once they come from elsewhere.
        """
        return max(ceil_div(self.num_tokens + added, self.block_size) - len(self.blocks), 0)

    def num_added_by_fork(self, added: int) -> int:
        """Returns the blocks that a fork with `added` more tokens does not share."""
        return ceil_div(self.num_tokens + added, self.block_size) - self.num_whole

    def take(self, count: int) -> None:
        """Adds fresh blocks. Raises ValueError when fewer are free."""
        self.blocks += self.pool.take(count, self.blocks[-1] if len(self.blocks) > self.num_freed else None)

    def write(self, num_tokens: int) -> None:
        """Records the next `num_tokens` tokens as written; they must have room."""
        stop = self.num_tokens + num_tokens
        first, start = divmod(self.num_tokens, self.block_size)
        last, rest = divmod(stop, self.block_size)
        if first < last:
            self.pool.write(self.blocks[first], start, self.block_size)
            self.pool.fill(self.blocks[first + 1 : last], self.block_size)
            start = 0
        if start < rest:
            self.pool.write(self.blocks[last], start, rest)
        self.num_tokens = stop

    @property
    def has_written_partial(self) -> bool:
        """Returns whether the last written block is not full, and none of its tokens wait to be copied."""
        rest = self.num_tokens % self.block_size
        return rest > 0 and self.pool.num_written(self.blocks[self.num_whole]) >= rest

    @property
    def is_written(self) -> bool:
        """Returns whether all tokens are in their blocks; False while a copy is pending."""
        size = self.block_size
        return all(
            self.pool.num_written(block) >= min(self.num_tokens - index * size, size)
            for index, block in enumerate(self.held, start=self.num_freed)
        )

    def share(self, blocks: Sequence[int]) -> None:
        """Adds whole blocks of written tokens that have other holders, or are FREED."""
        for block in blocks:
            if block == FREED:
                self.num_freed += 1
            else:
                self.pool.share(block)
        self.blocks += blocks
        self.num_tokens += len(blocks) * self.block_size

    def splits_shared(self, num_tokens: int) -> bool:
        """Returns whether a cut to `num_tokens` keeps written tokens in part of a shared block."""
        if num_tokens >= self.num_tokens or num_tokens % self.block_size == 0:
            return False
        return self.pool.references(self.blocks[num_tokens // self.block_size]) > 1

    def replace(self, index: int) -> tuple[int, int]:
        """Puts a fresh block into the place of a shared one; returns the old id and the new one."""
        source = self.blocks[index]
        (target,) = self.pool.take(1, self.blocks[index - 1] if index else None)
        self.blocks[index] = target
        self.pool.release(source)
        return source, target

    def drop_written(self, num_tokens: int) -> None:
        """Releases the blocks that are written; `num_tokens` tokens are in the blocks behind them.

        | 7 | 3 | 4 . | 8 | 9 . |    ->    | 8 | 9 . |
        """
        num_before = ceil_div(self.num_tokens, self.block_size)
        self.pool.release(*self.blocks[:num_before])
        del self.blocks[:num_before]
        self.num_tokens = 0
        self.write(num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Releases the blocks past `num_tokens`."""
        keep = ceil_div(num_tokens, self.block_size)
        self.pool.release(*self.blocks[max(keep, self.num_freed) :])
        del self.blocks[keep:]
        self.num_freed = min(self.num_freed, keep)
        self.num_tokens = min(self.num_tokens, num_tokens)

    def check_integrity(self) -> None:
        """Raises AssertionError for a block held twice, tokens without one, or a shared one to be written."""
        if len(set(self.held)) < len(self.held) or self.room < 0:
            raise AssertionError(f"{self.num_tokens} tokens in blocks {self.blocks}")
        shared = [
            block
            for block in self.blocks[max(self.num_whole, self.num_freed) :]
            if self.pool.references(block) != 1
        ]
        if shared:
            raise AssertionError(f"blocks {shared} are still to be written and have other holders")


# A sequence that grows reads one slot and writes another.
SLOTS_PER_SEQUENCE = 2


class StateSlots:
    """Holds the slots of one sequence.

    current: None before the first commit. following: None until taken.
    is_awaited: whether tokens are written, and their state comes with those of the next commit.
    """

    __slots__ = ("current", "following", "is_awaited", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.current: int | None = None
        self.following: int | None = None
        self.is_awaited = False

    @property
    def num_missing(self) -> int:
        """Returns how many slots the next pass needs."""
        return int(self.following is None)

    @property
    def held(self) -> list[int]:
        """Lists the slots that it holds."""
        return [slot for slot in (self.current, self.following) if slot is not None]

    def take(self) -> None:
        """Takes a fresh slot for the next pass, unless it has one. Raises ValueError when none is free."""
        if self.following is None:
            (self.following,) = self.pool.take(1, self.current)

    def share(self, slot: int) -> None:
        """Begins with a state that has other holders."""
        self.pool.share(slot)
        self.current = slot

    def advance(self) -> None:
        """Makes the state that was written the current one."""
        if self.current is not None:
            self.pool.release(self.current)
        self.current, self.following, self.is_awaited = self.following, None, False

    def release(self) -> None:
        """Lets go of all slots."""
        self.pool.release(*self.held)
        self.current = self.following = None
