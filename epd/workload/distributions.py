"""Draws sizes that vary between requests: fixed, uniform, or one of several values, in one notation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from epd.errors import RequestError

_NUMBER = r"\d+(?:\.\d+)?"
_RANGE = re.compile(rf"({_NUMBER})(?:\.\.({_NUMBER}))?(?:\*({_NUMBER}))?")


@dataclass(frozen=True, slots=True)
class Range:
    """From low to high, both included. weight: how often this range is picked, in proportion."""

    low: float
    high: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise RequestError(
                f"a size distribution goes from {self.low} to {self.high}; it must go upward from 0 or more"
            )
        if not 0 < self.weight < math.inf:
            raise RequestError(f"a part of a size distribution has weight {self.weight}; it must be above 0")

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}..{self.high:g}"


@dataclass(frozen=True, slots=True)
class SizeDistribution:
    """One of several ranges, picked by weight, then uniform within.

    Written `32` (fixed), `16..64` (uniform), `1|4|8` (each as likely), `1*3|4..8*1` (three to one).
    """

    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("a size distribution needs at least one range")

    @classmethod
    def of(cls, low: float, high: float | None = None) -> Self:
        """Returns a fixed value, or a uniform range from low to high, both included."""
        return cls((Range(low, low if high is None else high),))

    @classmethod
    def parse(cls, text: str | float) -> Self:
        """Returns the notation above. Raises RequestError for anything else."""
        matches = [_RANGE.fullmatch(part.strip()) for part in str(text).split("|")]
        if not all(matches):
            raise RequestError(f"{text!r} is not a size distribution; write 32, 16..64, 1|4|8 or 1*3|4*1")
        found = [match.groups() for match in matches if match]
        return cls(tuple(Range(float(low), float(high or low), float(lot or 1)) for low, high, lot in found))

    @property
    def low(self) -> float:
        return min(one.low for one in self.ranges)

    @property
    def mean(self) -> float:
        total = sum(one.weight for one in self.ranges)
        return sum(one.weight * (one.low + one.high) / 2 for one in self.ranges) / total

    def draw(self, rng: np.random.Generator) -> float:
        picked = self._pick(rng)
        return float(rng.uniform(picked.low, picked.high))

    def draw_count(self, rng: np.random.Generator) -> int:
        """Returns a whole number; the ends of its range are as likely as what is between them."""
        picked = self._pick(rng)
        return int(rng.integers(round(picked.low), round(picked.high), endpoint=True))

    def _pick(self, rng: np.random.Generator) -> Range:
        if len(self.ranges) == 1:
            return self.ranges[0]
        return self.ranges[pick_weighted(rng, [one.weight for one in self.ranges])]

    def __str__(self) -> str:
        is_even = len({one.weight for one in self.ranges}) == 1
        return "|".join(str(one) if is_even else f"{one}*{one.weight:g}" for one in self.ranges)


def pick_weighted(rng: np.random.Generator, weights: Sequence[float]) -> int:
    """Returns an index, each with a probability in proportion to its weight."""
    bounds = np.cumsum(weights)
    index = int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right"))
    return min(index, len(weights) - 1)
