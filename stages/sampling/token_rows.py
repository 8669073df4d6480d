"""Stores the token ids of one answer and their positions, prompt first, in memory that grows."""

from __future__ import annotations

import numpy as np

from encoders.adapter import PromptPlan
from epd.types import Int64Array

_SPARE_TOKENS = 64


class TokenRows:
    """Stores ids: int64 [T], and positions: int64 [rows, T], as planned, then one more for each token.

    T is what has room, not what is known: see `reserve`.
    """

    __slots__ = ("_next_position", "_num_prompt", "ids", "positions")

    def __init__(self, prompt: PromptPlan) -> None:
        self._num_prompt = len(prompt)
        self._next_position = prompt.next_position
        self.ids: Int64Array = np.array(prompt.token_ids, dtype=np.int64)
        self.positions: Int64Array = np.array(prompt.positions, dtype=np.int64)
        self.reserve(len(prompt) + 1)

    def place_as(self, other: TokenRows) -> None:
        """Takes the positions of another answer's prompt; those of kept visual tokens come with them."""
        self.positions[:, : self._num_prompt] = other.positions[:, : self._num_prompt]

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
