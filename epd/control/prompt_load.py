"""Learns how long prompts wait and how long one more takes, while they arrive and are computed.

    first tokens of one worker   t0 ---- t1 ------- t2            busy: a prompt takes the time between them
                                         ^ came alone, after t0   idle: only its own prefill is counted

The time between first tokens of a busy worker includes everything that delays the next prompt: decode steps
and encoding too, where it runs those. An idle worker delays no other prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from epd.control.elasticity.rates import RoundCost
from epd.control.recent import DecayedMean
from epd.control.retention import PromptLoad

_COST_MEMORY_S = 20.0  # seconds of work
_RATE_MEMORY_S = 5.0
_SHAPE_MEMORY = 20.0  # requests
_LEADS = 20  # of idle workers: their median, as one may hold the stall of a burst that follows it


class PromptLoadEstimator:
    """Observes every prompt and every first token. Times in seconds on one clock."""

    def __init__(self) -> None:
        self._cost = RoundCost(_COST_MEMORY_S)
        self._text, self._visual = DecayedMean(_SHAPE_MEMORY), DecayedMean(_SHAPE_MEMORY)
        self._leads: deque[float] = deque(maxlen=_LEADS)
        self._rate = 0.0
        self._arrived_s = -math.inf
        self._first_s: dict[str, float] = {}

    def arrived(self, now_s: float, num_text_tokens: int, num_visual_tokens: int) -> None:
        """Counts a prompt that arrived, with its visual tokens before reduction."""
        self._rate = self._rate_at(now_s) + 1 / _RATE_MEMORY_S
        self._arrived_s = now_s
        self._text.add(num_text_tokens, 1, 1)
        self._visual.add(num_visual_tokens, 1, 1)

    def first_token(
        self, now_s: float, worker: str, placed_s: float, num_tokens: int, prefill_s: float
    ) -> None:
        """Records that a prompt of num_tokens, which the worker got at placed_s, is computed.

        prefill_s: of passes with parts of it, other prompts' parts included.
        """
        last_s = self._first_s.get(worker, -math.inf)
        self._first_s[worker] = now_s
        if placed_s < last_s:
            self._cost.add(1, num_tokens, max(0.0, now_s - last_s))
        else:
            took_s = min(prefill_s, now_s - placed_s)
            self._cost.add(1, num_tokens, took_s)
            self._leads.append(now_s - placed_s - took_s)

    def load(
        self,
        now_s: float,
        ahead: Iterable[int],
        *,
        num_workers: int,
        num_waiting: int = 0,
        kv_usage: float = 0.0,
    ) -> PromptLoad:
        """Returns the load. ahead: tokens of each waiting prompt. num_workers: that prefill, at least 1."""
        fixed_s, token_s = self._cost.line or (0.0, 0.0)
        backlog_s = sum(fixed_s + token_s * tokens for tokens in ahead) / num_workers
        return PromptLoad(
            wait_s=max(backlog_s, median(self._leads) if self._leads else 0.0),
            fixed_s=fixed_s + token_s * (self._text.value or 0.0),
            visual_s=token_s * (self._visual.value or 0.0),
            rate=self._rate_at(now_s) / num_workers,
            num_waiting=num_waiting,
            kv_usage=kv_usage,
        )

    def tokens_at(self, retention: float) -> int:
        """Returns the tokens of the mean prompt with that share of its visual tokens."""
        return round((self._text.value or 0.0) + (self._visual.value or 0.0) * retention)

    def _rate_at(self, now_s: float) -> float:
        """Returns prompts per second: older ones count for less."""
        return self._rate * math.exp(-max(0.0, now_s - self._arrived_s) / _RATE_MEMORY_S)
