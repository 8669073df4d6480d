"""Which KV blocks of one layer group are free, and how many hold each of the others. Ids only, no tensors."""

from __future__ import annotations

import heapq


class BlockPool:
    """Blocks 0 to num_blocks - 1 with reference counts; one without references is free.

    Fresh blocks continue the run they are asked to follow, or else are the lowest that are free: tables tend
    to be ascending runs, which attention can read as they lie.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._lowest = list(range(num_blocks))  # a heap of all free blocks and some that are not any more

    def references(self, block: int) -> int:
        """How many hold the block; 0 is free."""
        return self._references[block]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` fresh blocks, held once; the first follows block `after` where that is free.

        Raises ValueError when fewer are free.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} are free; release some")
        self.num_free -= count
        taken: list[int] = []
        for _ in range(count):
            after = self._next(after)
            self._references[after] = 1
            taken.append(after)
        return taken

    def _next(self, after: int | None) -> int:
        if after is not None and after + 1 < self.num_blocks and not self._references[after + 1]:
            return after + 1
        while self._references[self._lowest[0]]:
            heapq.heappop(self._lowest)
        return heapq.heappop(self._lowest)

    def share(self, block: int) -> None:
        """One more holds the block. Raises ValueError for a free one."""
        if not self._references[block]:
            raise ValueError(f"block {block} is free and cannot be shared; take it")
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One fewer holds the block; the last makes it free. Raises ValueError for a free one."""
        if not self._references[block]:
            raise ValueError(f"block {block} is free already")
        self._references[block] -= 1
        if not self._references[block]:
            self._free(block)

    def _free(self, block: int) -> None:
        self.num_free += 1
        heapq.heappush(self._lowest, block)
        if len(self._lowest) > 2 * self.num_blocks:
            self._lowest = [block for block, count in enumerate(self._references) if not count]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free blocks are those without references."""
        free = {block for block, count in enumerate(self._references) if not count}
        if len(free) != self.num_free or not free <= set(self._lowest):
            raise AssertionError(f"{len(free)} blocks have no references, {self.num_free} count as free")
