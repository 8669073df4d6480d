"""Remembers which cached tokens a question may not drop: the key set of MustDrop, a bit for each slot.

    block     |  7              |  3              |      of layer group 0, as in the block tables
    bits      |  0  1  0  0     |  1  0  0  0     |      written when a token is computed

A later question about the same video finds keys and values alone, and reads the bits where these lie. So
they go wherever a block goes: shared with the prefix cache, copied, to host memory and back. They stay on the
host, which learns them with the embeddings. What is sent to other workers has been chosen, and needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epd.kv.kv_cache import BlockCopy
from epd.types import BoolArray, Int64Array


class GuardedTokens:
    """Holds the bits of one worker's blocks, and of requests in host memory."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._bits: BoolArray = np.zeros((num_blocks, block_size), dtype=bool)
        self._offloaded: dict[str, BoolArray] = {}

    def write(self, block_table: Sequence[int], start: int, bits: BoolArray) -> None:
        """Notes the bits of tokens [start, start + len(bits)), whatever was in their slots."""
        self._bits[self._slots(block_table, start, start + len(bits))] = bits

    def read(self, block_table: Sequence[int], num_tokens: int) -> BoolArray:
        """Returns the bits of the first tokens, bool [num_tokens]."""
        return self._bits[self._slots(block_table, 0, num_tokens)]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Carries out copy-on-write, in order."""
        for copy in copies:
            if copy.layer_group == 0:
                self._bits[copy.target, : copy.num_tokens] = self._bits[copy.source, : copy.num_tokens]

    def offload(self, request_id: str, block_table: Sequence[int], num_tokens: int) -> None:
        """Keeps the bits of a request's first tokens, whose blocks it gives up."""
        self._offloaded[request_id] = self.read(block_table, num_tokens)

    def restore(self, request_id: str, block_table: Sequence[int], start: int, stop: int) -> None:
        """Puts those of tokens [start, stop) into its new blocks, and forgets all that was kept."""
        self.write(block_table, start, self._offloaded.pop(request_id)[start:stop])

    def forget(self, request_id: str) -> None:
        """Drops what is kept of a request."""
        self._offloaded.pop(request_id, None)

    def _slots(self, block_table: Sequence[int], start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        at, size = np.arange(start, stop), self._bits.shape[1]
        blocks = np.asarray(block_table[start // size : (stop + size - 1) // size], dtype=np.int64)
        return blocks[at // size - start // size], at % size
