"""Simulates decode steps quickly: many steps as one event, and blocks whose place does not matter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from epd.kv.block_pool import BlockPool
from epd.kv.scheduled_request import ScheduledRequest


@dataclass(slots=True)
class StepRun:
    """Combines decode steps of the same requests.

    base, context: ticks and tokens of the first
    num_allocated: steps whose blocks are taken
    """

    requests: list[ScheduledRequest]
    num_steps: int
    base: int
    context: int
    per_context: int
    num_allocated: int = 0

    def ticks(self, num_steps: int) -> int:
        pairs = len(self.requests) * (num_steps * (num_steps - 1) // 2)
        return num_steps * self.base + self.per_context * (num_steps * self.context + pairs)

    def steps_until(self, ticks: int) -> int:
        """Returns the least number of steps, at least 1, that take `ticks` or longer."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.ticks(middle) >= ticks:
                high = middle
            else:
                low = middle + 1
        return low


class StackedBlocks(BlockPool):
    """Stands in for a `BlockPool` whose blocks have one holder each: last released, first taken."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(min(num_blocks, 1))  # what it keeps of each block is not used
        self.num_blocks = self.num_free = num_blocks
        # The stack: blocks that were never taken, of which there may be very many, below the released ones.
        self._num_untouched = num_blocks
        self._released: list[int] = []
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
        num_new = max(0, count - len(self._released))
        start = len(self._released) - (count - num_new)
        taken = [*range(self._num_untouched - num_new, self._num_untouched), *self._released[start:]]
        self._num_untouched -= num_new
        del self._released[start:]
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
        self._released += blocks
        self.num_free += len(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the free blocks are those without a holder."""
        free = {block for block, held in enumerate(self._held) if not held}
        stack = [*range(self._num_untouched), *self._released]
        if free != set(stack) or len(stack) != len(free) or self.num_free != len(free):
            raise AssertionError(f"{len(free)} blocks have no holder, {self.num_free} count as free")
