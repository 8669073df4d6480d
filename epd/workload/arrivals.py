"""Draws when requests arrive: processes with a mean rate, from a generator that is passed in.

Each gives an endless, non-decreasing stream of seconds from the start of the run, so that a benchmark and a
simulator cut it where they like and draw the same times from the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from epd.errors import RequestError

_BATCH = 1024


class ArrivalKind(StrEnum):
    """How requests arrive."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURSTY = "bursty"
    RAMP = "ramp"
    TRACE = "trace"
    CLOSED = "closed"


class ArrivalTimes(Protocol):
    """A stream of arrival times."""

    def times_s(self, rng: np.random.Generator, /) -> Iterator[float]:
        """Yields seconds from the start, non-decreasing; endless but for a trace."""
        ...


def _check_rate(name: str, rate_per_s: float) -> None:
    if not 0 < rate_per_s < math.inf:
        raise RequestError(f"{name} is {rate_per_s}, it must be above 0 requests per second; try 1")


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """One request every 1 / rate seconds, the first at 0."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate_per_s)

    def times_s(self, _rng: np.random.Generator, /) -> Iterator[float]:
        index = 0
        while True:
            yield index / self.rate_per_s
            index += 1


@dataclass(frozen=True, slots=True)
class BurstyArrivals:
    """Draws gaps from a gamma distribution of mean 1 / rate, as vLLM's benchmark defines burstiness.

    burstiness: the shape of the gamma; 1 is a Poisson process, below 1 requests come in bursts, above 1 they
        come more evenly. The coefficient of variation of the gaps is burstiness ** -0.5.
    """

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        _check_rate("rate", self.rate_per_s)
        if not 0 < self.burstiness < math.inf:
            raise RequestError(f"burstiness is {self.burstiness}, it must be above 0; 1 is a Poisson process")

    def times_s(self, rng: np.random.Generator, /) -> Iterator[float]:
        now_s = 0.0
        while True:
            scale_s = 1.0 / (self.rate_per_s * self.burstiness)
            for gap_s in rng.gamma(self.burstiness, scale_s, _BATCH).tolist():
                now_s += gap_s
                yield now_s


def poisson_arrivals(rate_per_s: float) -> BurstyArrivals:
    """Returns a Poisson process: exponential gaps."""
    return BurstyArrivals(rate_per_s, 1.0)


@dataclass(frozen=True, slots=True)
class RampArrivals:
    """A Poisson process whose rate rises linearly from start to end during ramp_s, and then stays.

    Drawn by inversion: a unit Poisson process in the expected number of requests, whose points are carried to
    the times at which that number is reached.
    """

    start_rate_per_s: float
    end_rate_per_s: float
    ramp_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.start_rate_per_s < math.inf:
            raise RequestError(f"the ramp starts at rate {self.start_rate_per_s}, it must be 0 or above")
        _check_rate("the rate at the end of the ramp", self.end_rate_per_s)
        if not 0 < self.ramp_s < math.inf:
            raise RequestError(f"the ramp takes {self.ramp_s} s, it must be above 0; try 60")

    def expected(self, time_s: float) -> float:
        """Returns how many requests have come by a time, on average."""
        ramped_s = min(time_s, self.ramp_s)
        slope = (self.end_rate_per_s - self.start_rate_per_s) / self.ramp_s
        in_ramp = (self.start_rate_per_s + slope * ramped_s / 2) * ramped_s
        return in_ramp + self.end_rate_per_s * (time_s - ramped_s)

    def times_s(self, rng: np.random.Generator, /) -> Iterator[float]:
        num_expected = 0.0
        while True:
            for gap in rng.exponential(1.0, _BATCH).tolist():
                num_expected += gap
                yield self._reached_s(num_expected)

    def _reached_s(self, num_expected: float) -> float:
        """Returns the inverse of expected()."""
        beyond = num_expected - self.expected(self.ramp_s)
        if beyond >= 0:
            return self.ramp_s + beyond / self.end_rate_per_s
        start, slope = self.start_rate_per_s, (self.end_rate_per_s - self.start_rate_per_s) / self.ramp_s
        # The root of start * t + slope * t**2 / 2, in the form that does not cancel when the slope is small.
        root = math.sqrt(max(0.0, start**2 + 2 * slope * num_expected))
        return min(self.ramp_s, 2 * num_expected / (start + root)) if num_expected > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TraceArrivals:
    """The times of a trace, as they are."""

    trace_s: tuple[float, ...]

    def __post_init__(self) -> None:
        later = zip(self.trace_s, self.trace_s[1:], strict=False)
        if any(after < before for before, after in later) or (self.trace_s and self.trace_s[0] < 0):
            raise ValueError("the times of a trace must be in order, the first at 0 or later")

    def times_s(self, _rng: np.random.Generator, /) -> Iterator[float]:
        return iter(self.trace_s)


@dataclass(frozen=True, slots=True)
class ClosedArrivals:
    """All at once: how many are in flight is set by the sender alone (a closed loop), not by a clock."""

    def times_s(self, _rng: np.random.Generator, /) -> Iterator[float]:
        while True:
            yield 0.0
