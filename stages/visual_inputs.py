"""Collects one prompt's visual tokens, group by group, and serves them to chunks of any size.

visual tokens      0        10        20        30        40
arrived groups     [   g0   )[   g1   )[   g2   )
a chunk needs              [       )                          may begin and end inside groups
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from epd.encoders import Embeddings, PromptPlan, concatenated
from epd.types import BoolArray, Int64Array


@dataclass(frozen=True, slots=True)
class PlacedEmbeddings:
    """Holds visual tokens and their places in the prompt, int64 [V]: see `token_indices`.

    positions: int64 [rows, V], if only these tokens determine them: see `PromptPlan.reduction`.
    is_key: bool [V], those that no question may drop, if questions drop any.
    """

    embeddings: Embeddings
    indices: Int64Array
    positions: Int64Array | None = None
    is_key: BoolArray | None = None

    def __post_init__(self) -> None:
        if len(self.embeddings) != len(self.indices):
            raise ValueError(
                f"{len(self.embeddings)} visual tokens need as many places, got {len(self.indices)}"
            )


class VisualInputs:
    """Tracks one prompt's visual tokens. indices: int64 [V], prompt positions of all, ascending.

    All tokens of a window that is reduced in prefill are at its start, and come to a chunk together.
    """

    def __init__(self, prompt: PromptPlan, num_prompt_tokens: int) -> None:
        """Takes the plan. num_prompt_tokens: how much of the prompt is wanted at all."""
        self._num_prompt_tokens = num_prompt_tokens
        ranges = [item.token_indices(0, len(item.units)) for item in prompt.media]
        indices = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        self.indices: Int64Array = indices[indices < num_prompt_tokens]
        self._parts: list[Embeddings] = []
        self._starts: list[int] = []  # of each part, counted in visual tokens
        self._num_arrived = 0

    def skip(self, num_tokens: int) -> None:
        """Skips prompt tokens [0, num_tokens), already computed: their visual tokens need not arrive."""
        self._num_arrived = max(self._num_arrived, self._count(num_tokens))

    def add(self, placed: PlacedEmbeddings) -> None:
        """Takes the next group. What was skipped is dropped. Raises ValueError for anything out of order."""
        start = int(np.searchsorted(self.indices, placed.indices[0]))
        stop = start + len(placed.indices)
        is_known = np.array_equal(self.indices[start:stop], placed.indices)
        if not is_known or start > self._num_arrived:
            raise ValueError(
                f"visual tokens at [{placed.indices[0]}, {placed.indices[-1]}] do not follow the "
                f"{self._num_arrived} of {len(self.indices)} that have arrived; send groups in order"
            )
        if stop <= self._num_arrived:
            return
        self._starts.append(start)
        self._parts.append(placed.embeddings)
        self._num_arrived = stop

    @property
    def num_ready(self) -> int:
        """Returns the end of prompt tokens [0, num_ready) that have all they need."""
        if self._num_arrived >= len(self.indices):
            return self._num_prompt_tokens
        return int(self.indices[self._num_arrived])

    def part(self, start: int, stop: int) -> PlacedEmbeddings | None:
        """Returns the visual tokens among prompt tokens [start, stop), if any; indices count from `start`."""
        first, last = self._count(start), self._count(stop)
        if first == last:
            return None
        pieces = []
        at = bisect_right(self._starts, first) - 1
        while first < last:
            embeddings, offset = self._parts[at], first - self._starts[at]
            length = min(last - first, len(embeddings) - offset)
            pieces.append(embeddings.cut(offset, offset + length))
            first, at = first + length, at + 1
        return PlacedEmbeddings(
            concatenated(pieces), self.indices[last - sum(map(len, pieces)) : last] - start
        )

    def drop(self, num_tokens: int) -> None:
        """Drops embeddings that only prompt tokens [0, num_tokens) needed."""
        first = self._count(num_tokens)
        while self._parts and self._starts[0] + len(self._parts[0]) <= first:
            del self._parts[0], self._starts[0]

    def _count(self, num_tokens: int) -> int:
        return int(np.searchsorted(self.indices, num_tokens))
