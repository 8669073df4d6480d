"""Stores what is known of the tokens of one answer, prompt first, in memory that grows."""

from __future__ import annotations

import numpy as np

from epd.encoders.adapter import PromptPlan
from epd.types import BoolArray, Int64Array

_SPARE_TOKENS = 64


class TokenRows:
    """Stores ids: int64 [T], and positions: int64 [rows, T], as planned, then one more for each token.

    T is what has room, not what is known: see `reserve`.
    is_key: bool [num_prompt], the prompt's tokens that no question may drop; None until any has come.
    """

    __slots__ = ("_next_position", "_num_prompt", "ids", "is_key", "positions")

    def __init__(self, prompt: PromptPlan) -> None:
        self._num_prompt = len(prompt)
        self._next_position = prompt.next_position
        self.ids: Int64Array = np.array(prompt.token_ids, dtype=np.int64)
        self.positions: Int64Array = np.array(prompt.positions, dtype=np.int64)
        self.is_key: BoolArray | None = None
        self.reserve(len(prompt) + 1)

    def place(self, indices: Int64Array, positions: Int64Array | None, is_key: BoolArray | None) -> None:
        """Takes what comes with visual tokens at `indices`: their positions, and which of them must stay."""
        if positions is not None:
            self.positions[:, indices] = positions
        if is_key is not None:
            if self.is_key is None:
                self.is_key = np.zeros(self._num_prompt, dtype=bool)
            self.is_key[indices] = is_key

    def place_as(self, other: TokenRows) -> None:
        """Takes what came with the visual tokens of another answer to the same prompt."""
        self.positions[:, : self._num_prompt] = other.positions[:, : self._num_prompt]
        self.is_key = other.is_key

    def reserve(self, num_tokens: int) -> None:
        """Makes room for tokens [0, num_tokens), and for as many again, so that growing costs little."""
        room = len(self.ids)
        if num_tokens <= room:
            return
        added = max(num_tokens - room, room - self._num_prompt, _SPARE_TOKENS)
        first = self._next_position + room - self._num_prompt
        generated = np.broadcast_to(
            np.arange(first, first + added, dtype=np.int64), (len(self.positions), added)
        )
        self.ids = np.concatenate([self.ids, np.zeros(added, dtype=np.int64)])
        self.positions = np.concatenate([self.positions, generated], axis=1)
