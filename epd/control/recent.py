"""Remembers the recent past: the last used entries, means in which older samples count for less, paces."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# Bytes that take as long as a read does besides its bytes, about.
_READ_BYTES = 1 << 16
# Variance of `ReadPace`'s x below which reads are about as large.
_ALIKE = 1e-4


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


class Pace:
    """Measures the seconds that a unit of work takes. Thread-safe. Times are of one clock, in seconds.

    Work that is done at once counts for the time that it takes together.
    """

    def __init__(self, memory_s: float = 30.0, forget_s: float = math.inf) -> None:
        """forget_s: without work, after which nothing is known."""
        self._memory_s = memory_s
        self._forget_s = forget_s
        self._seen_s = -math.inf
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._mean = DecayedMean(self._memory_s)

    def add(self, units: float, start_s: float, stop_s: float) -> None:
        """Adds work that was done from one time to another."""
        with self._lock:
            if stop_s - self._seen_s > self._forget_s:
                self._reset()
            elapsed_s = min(max(0.0, stop_s - self._seen_s), 1e6)
            self._note(units, max(0.0, stop_s - max(start_s, self._seen_s)), elapsed_s)
            self._seen_s = max(stop_s, self._seen_s)

    def _note(self, units: float, taken_s: float, elapsed_s: float) -> None:
        self._mean.add(taken_s, units, elapsed_s)

    def seconds(self, units: float, now_s: float) -> float | None:
        """Returns the seconds for some work; None where nothing is known."""
        per_unit_s = self._per_unit_s(units)
        if per_unit_s is None or now_s - self._seen_s > self._forget_s:
            return None
        return units * per_unit_s

    def _per_unit_s(self, units: float) -> float | None:  # noqa: ARG002 - it is the same for all
        return self._mean.value


class ReadPace(Pace):
    """Measures reads, each of which takes some time beside that of its bytes. Units are bytes.

    seconds / (bytes + 64 KiB)
        |  x
        |     ---x       a line through what was measured
        |            x
        +----------------- 64 KiB / (bytes + 64 KiB)
          many        none

    While all reads were about as large, the line is flat: a read takes as long as 64 KiB beside its bytes.
    """

    def _reset(self) -> None:
        self._sums = [0.0] * 5  # of 1, x, x * x, y and x * y

    def _note(self, units: float, taken_s: float, elapsed_s: float) -> None:
        x, y = _READ_BYTES / (_READ_BYTES + units), taken_s / (_READ_BYTES + units)
        keep = math.exp(-elapsed_s / self._memory_s)
        self._sums = [
            total * keep + each for total, each in zip(self._sums, (1.0, x, x * x, y, x * y), strict=True)
        ]

    def seconds(self, units: float, now_s: float) -> float | None:
        return super().seconds(_READ_BYTES + units, now_s)

    def _per_unit_s(self, units: float) -> float | None:
        """Returns the line's height for a read, with what it takes beside its bytes among the units."""
        weight = self._sums[0]
        if not weight:
            return None
        x, xx, y, xy = (total / weight for total in self._sums[1:])
        slope = (xy - x * y) / (xx - x * x + _ALIKE)
        slope = max(-y / max(1.0 - x, _ALIKE), min(slope, y / max(x, _ALIKE)))  # no read takes less than 0
        return y + slope * (_READ_BYTES / units - x)


class Recent(Generic[K, V]):
    """Keeps the `max_items` entries that were set or read last. Thread-safe."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
            return self._items.get(key)

    def set(self, key: K, value: V) -> None:
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            if len(self._items) > self._max_items:
                self._items.popitem(last=False)

    def drop(self, value: V) -> None:
        """Forgets all keys of a value."""
        with self._lock:
            for key in [key for key, held in self._items.items() if held == value]:
                del self._items[key]

    def __len__(self) -> int:
        return len(self._items)
