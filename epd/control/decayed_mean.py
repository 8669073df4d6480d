"""Provides a mean in which older samples count for less."""

from __future__ import annotations

import math


class DecayedMean:
    """Keeps a ratio of two sums that both decay by the same clock."""

    def __init__(self, memory: float, total: float = 0.0, weight: float = 0.0) -> None:
        self._memory = memory
        self._total = total
        self._weight = weight

    def add(self, total: float, weight: float, elapsed: float) -> None:
        """Adds to both sums. elapsed: time on the clock in which `memory` is given."""
        keep = math.exp(-elapsed / self._memory)
        self._total = self._total * keep + total
        self._weight = self._weight * keep + weight

    @property
    def value(self) -> float | None:
        """Returns the ratio, None before the first sample."""
        return self._total / self._weight if self._weight > 0 else None
