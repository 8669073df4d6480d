"""Remembers the recent past: last used entries, means that older samples count less in, paces, arrivals."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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


_MAX_RECENT = 10_000
# Of one front between two looks; a look a second never sees as many.
_MAX_REQUESTS = 10_000
_PUBLISH_S = 1.0  # between totals that other fronts are sent


@dataclass(frozen=True, slots=True)
class RequestWork:
    """Describes the work of one request at each stage, as planned on its arrival.

    max_tokens: upper bound of its answers' tokens
    expected_tokens: of its answers while their lengths are unknown; None means max_tokens
    """

    num_patches: int
    num_prompt_tokens: int
    max_tokens: int
    expected_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.num_patches < 0 or self.num_prompt_tokens < 1 or self.max_tokens < 1:
            raise ValueError(f"a request has a prompt and an answer of at least 1 token, got {self}")


@dataclass(frozen=True, slots=True)
class TrafficTotals:
    """The traffic of one front since its start.

    num_with_media: requests that have patches
    expected_tokens: of their answers, or max_tokens where that is not known
    num_finished: answers that have ended
    num_waiting: requests that no worker has taken, now
    """

    num_requests: int = 0
    num_with_media: int = 0
    num_patches: int = 0
    num_prompt_tokens: int = 0
    max_tokens: int = 0
    expected_tokens: int = 0
    num_finished: int = 0
    num_waiting: int = 0

    def plus(self, work: RequestWork) -> TrafficTotals:
        """Returns the totals after one more request."""
        return replace(
            self,
            num_requests=self.num_requests + 1,
            num_with_media=self.num_with_media + bool(work.num_patches),
            num_patches=self.num_patches + work.num_patches,
            num_prompt_tokens=self.num_prompt_tokens + work.num_prompt_tokens,
            max_tokens=self.max_tokens + work.max_tokens,
            expected_tokens=self.expected_tokens + (work.expected_tokens or work.max_tokens),
        )

    def since(self, before: TrafficTotals) -> list[RequestWork]:
        """Returns as many requests as came in between, which together have the same work."""
        num = min(self.num_requests - before.num_requests, _MAX_REQUESTS)
        if num <= 0:
            return []
        num_media = min(self.num_with_media - before.num_with_media, num)
        patches = [*_parts(self.num_patches - before.num_patches, num_media), *[0] * (num - num_media)]
        prompts = _parts(self.num_prompt_tokens - before.num_prompt_tokens, num)
        longest = _parts(self.max_tokens - before.max_tokens, num)
        expected = _parts(self.expected_tokens - before.expected_tokens, num)
        return [
            RequestWork(each, max(1, prompt), max(1, most), max(1, tokens))
            for each, prompt, most, tokens in zip(patches, prompts, longest, expected, strict=True)
        ]


class Arrivals:
    """Keeps the latest requests of all fronts, and the totals of this one.

    num_arrived, num_finished: requests and ended answers of all fronts, as far as known here
    """

    def __init__(self, window_s: float = 600.0) -> None:
        """Starts without requests. window_s: of the arrivals that `recent` returns."""
        self.num_arrived = self.num_finished = 0
        self._window_s = window_s
        self._totals = self._published = TrafficTotals()
        self._published_s = float("-inf")
        self._fronts: Mapping[str, TrafficTotals] = {}
        self._recent: deque[tuple[float, RequestWork]] = deque(maxlen=_MAX_RECENT)

    def arrived(self, now_s: float, work: RequestWork) -> None:
        """Counts a request of this front that was not refused."""
        self._totals = self._totals.plus(work)
        self._keep(now_s, work)

    def finished(self) -> None:
        """Counts an answer of this front that has ended, completely or not."""
        self._totals = replace(self._totals, num_finished=self._totals.num_finished + 1)
        self.num_finished += 1

    def recent(self, now_s: float) -> tuple[tuple[float, RequestWork], ...]:
        """Returns arrivals of the last window_s as (time, work), oldest first, the latest 10,000 at most."""
        while self._recent and self._recent[0][0] < now_s - self._window_s:
            self._recent.popleft()
        return tuple(self._recent)

    def newest(self, num: int) -> Sequence[tuple[float, RequestWork]]:
        """Returns the last arrivals, oldest first, as far as they are kept."""
        return list(islice(self._recent, max(0, len(self._recent) - num), None))

    # Other fronts

    def published(self, now_s: float, num_waiting: int) -> TrafficTotals:
        """Returns what other fronts count of this one; it changes once a second at most."""
        if now_s - self._published_s >= _PUBLISH_S:
            self._published_s = now_s
            self._published = replace(self._totals, num_waiting=num_waiting)
        return self._published

    @property
    def num_waiting_elsewhere(self) -> int:
        """Returns the requests in the queues of the other fronts."""
        return sum(totals.num_waiting for totals in self._fronts.values())

    def follow(self, now_s: float, fronts: Mapping[str, TrafficTotals]) -> None:
        """Counts what came since the last call. fronts: the others that are there, by id.

        What a front had before it was first seen does not count: it may be long ago.
        """
        for front, totals in fronts.items():
            before = self._fronts.get(front, totals)
            for work in totals.since(before):
                self._keep(now_s, work)
            self.num_finished += min(totals.num_finished - before.num_finished, _MAX_REQUESTS)
        self._fronts = dict(fronts)

    def _keep(self, now_s: float, work: RequestWork) -> None:
        self.num_arrived += 1
        self._recent.append((now_s, work))


def _parts(total: int, num: int) -> Iterator[int]:
    """Yields that many numbers, as equal as can be, whose sum is the total."""
    return (total * (index + 1) // num - total * index // num for index in range(num))
