"""Keeps blocks of a simulated KV cache without prefix caching: where a block lies does not matter there."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from epd.kv.block_pool import BlockPool


class StackedBlocks(BlockPool):
    """Stands in for a `BlockPool` whose blocks have one holder each: last released, first taken."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free = list(range(num_blocks))
        self._held = bytearray(num_blocks)

    def references(self, block: int) -> int:
        return self._held[block]

    def num_written(self, block: int) -> int:  # noqa: ARG002 - of any
        """Returns a large number: all that has room counts as written."""
        return sys.maxsize

    def write(self, block: int, start: int, stop: int) -> None:
        """Keeps nothing."""

    def fill(self, blocks: Sequence[int], block_size: int) -> None:
        """Keeps nothing."""

    def take(self, count: int, after: int | None = None) -> list[int]:  # noqa: ARG002 - none is near another
        if count > self.num_free:
            raise ValueError(f"{count} blocks are needed, {self.num_free} are free; release some")
        self.num_free -= count
        taken = self._free[self.num_free :]
        del self._free[self.num_free :]
        for block in taken:
            self._held[block] = 1
        return taken

    def share(self, block: int) -> None:
        raise ValueError(f"block {block} cannot get a second holder: shared blocks need prefix caching")

    def release(self, *blocks: int) -> None:
        for block in blocks:
            if not self._held[block]:
                raise ValueError(f"block {block} is free already")
            self._held[block] = 0
        self._free += blocks
        self.num_free += len(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free blocks are those without a holder."""
        free = {block for block, held in enumerate(self._held) if not held}
        if free != set(self._free) or len(self._free) != len(free) or self.num_free != len(free):
            raise AssertionError(f"{len(free)} blocks have no holder, {self.num_free} count as free")
