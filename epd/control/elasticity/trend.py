"""Smooths a changing rate with its trend (Holt's linear method, damped), at uneven times."""

from __future__ import annotations

import math
from collections import deque


class RateTrend:
    """Estimates events per second. memory_s: memory of the level; the trend remembers twice as long."""

    def __init__(self, memory_s: float) -> None:
        self.memory_s = memory_s
        self.rate = 0.0
        self.slope = 0.0  # of the rate, per second
        self._seen_s = 0.0

    @property
    def is_settled(self) -> bool:
        """Returns whether the rate has seen more time than it remembers."""
        return self._seen_s > self.memory_s

    def add(self, num_events: float, seconds: float) -> None:
        """Adds the number of events in an interval that has just ended; intervals of length 0 are ignored."""
        if seconds <= 0:
            return
        self._seen_s += seconds
        # At first the level is the plain mean, so that one early burst does not become a trend.
        weight = max(1 - math.exp(-seconds / self.memory_s), seconds / self._seen_s)
        old = self.rate
        expected = max(0.0, self.rate + self.slope * seconds)
        self.rate = expected + weight * (num_events / seconds - expected)
        if self.is_settled:
            trend_weight = 1 - math.exp(-seconds / (2 * self.memory_s))
            self.slope += trend_weight * ((self.rate - old) / seconds - self.slope)


class Peak:
    """Keeps the largest value of the last window_s that lasted: single looks are mostly noise.

    lasting_s: time over which the smallest value counts
    """

    def __init__(self, window_s: float, lasting_s: float = 0.0) -> None:
        self._window_s = window_s
        self._lasting_s = lasting_s
        self._rising: deque[tuple[float, float]] = deque()  # each is smaller than all that came after it
        self._falling: deque[tuple[float, float]] = deque()  # each is larger than all that came after it

    def add(self, now_s: float, value: float) -> None:
        while self._rising and self._rising[-1][1] >= value:
            self._rising.pop()
        self._rising.append((now_s, value))
        while self._rising[0][0] < now_s - self._lasting_s:
            self._rising.popleft()
        self._note(now_s, self._rising[0][1])

    def _note(self, now_s: float, value: float) -> None:
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now_s, value))
        while self._falling[0][0] < now_s - self._window_s:
            self._falling.popleft()

    @property
    def value(self) -> float:
        """Returns the peak, 0 before the first value."""
        return self._falling[0][1] if self._falling else 0.0
