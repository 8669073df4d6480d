"""Loads that come and go: kinds of requests, each at a rate that changes with time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from epd.workload.requests import PlannedRequest, RequestShape

_AT_NIGHT = 0.1  # requests per second


@dataclass(frozen=True, slots=True)
class LoadWave:
    """Requests of one shape. rate_at: per second, by seconds from the start; never above max_rate."""

    shape: RequestShape
    rate_at: Callable[[float], float]
    max_rate: float

    def times_s(self, rng: np.random.Generator, duration_s: float) -> Iterator[float]:
        """A Poisson process of that rate: one of the highest rate, thinned out."""
        now_s = 0.0
        while self.max_rate > 0:
            now_s += float(rng.exponential(1 / self.max_rate))
            if now_s >= duration_s:
                return
            if rng.random() * self.max_rate < self.rate_at(now_s):
                yield now_s


def square_wave(low: float, high: float, period_s: float, phase: float = 0.0) -> Callable[[float], float]:
    """high for the first half of each period, then low. phase: of a period, [0, 1)."""
    return lambda now_s: high if (now_s / period_s + phase) % 1.0 < 0.5 else low


def sine_wave(low: float, high: float, period_s: float, phase: float = 0.0) -> Callable[[float], float]:
    """Between the two; in the middle and rising at phase 0."""
    middle, swing = (low + high) / 2, (high - low) / 2
    return lambda now_s: middle + swing * math.sin(2 * math.pi * (now_s / period_s + phase))


def requests_of(tides: Sequence[LoadWave], duration_s: float, seed: int) -> list[PlannedRequest]:
    """All tides together, in order of arrival, every request with content of its own."""
    streams = [
        [(now_s, kind) for now_s in tide.times_s(np.random.default_rng((seed, kind)), duration_s)]
        for kind, tide in enumerate(tides)
    ]
    return [
        PlannedRequest(index, now_s, tides[kind].shape, index, index)
        for index, (now_s, kind) in enumerate(heapq.merge(*streams))
    ]


def half_day(high: float, duration_s: float, *, is_first: bool) -> Callable[[float], float]:
    """A rate that swells to `high` and ebbs in one half of a day, and is a tenth of a request per second in
    the other."""
    sign = 1 if is_first else -1
    return lambda now_s: _AT_NIGHT + high * max(0.0, sign * math.sin(2 * math.pi * now_s / duration_s))


def day(first: RequestShape, second: RequestShape, high: float, duration_s: float) -> list[LoadWave]:
    """A day on which one kind of request gives way to another."""
    return [
        LoadWave(shape, half_day(high, duration_s, is_first=shape is first), high + _AT_NIGHT)
        for shape in (first, second)
    ]
