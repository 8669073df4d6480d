"""A rate that changes, smoothed with its trend (Holt's linear method, damped), at uneven times."""

from __future__ import annotations

import math


class RateTrend:
    """Events per second. memory_s: of the level; the trend remembers twice as long."""

    def __init__(self, memory_s: float) -> None:
        self.memory_s = memory_s
        self.rate = 0.0
        self.slope = 0.0  # of the rate, per second
        self._seen_s = 0.0

    def add(self, num_events: float, seconds: float) -> None:
        """So many events in an interval that has just ended. Intervals without length are ignored."""
        if seconds <= 0:
            return
        self._seen_s += seconds
        # At first the level is the plain mean of what was seen, so that one early burst is no trend.
        weight = max(1 - math.exp(-seconds / self.memory_s), seconds / self._seen_s)
        old = self.rate
        expected = max(0.0, self.rate + self.slope * seconds)
        self.rate = expected + weight * (num_events / seconds - expected)
        if self._seen_s > self.memory_s:
            trend_weight = 1 - math.exp(-seconds / (2 * self.memory_s))
            self.slope += trend_weight * ((self.rate - old) / seconds - self.slope)
