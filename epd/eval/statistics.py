"""Computes intervals and tests of shares that hold for few questions as well as for many."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, sqrt

# The normal distribution's 97.5 % quantile: intervals hold the truth 95 % of the time.
_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds a share by a 95 % confidence interval [low, high]."""

    low: float
    high: float


def wilson_interval(num_right: int, num_all: int) -> Interval:
    """Returns the interval of the share `num_right` of `num_all` (Wilson 1927). Raises ValueError for 0."""
    if not 0 <= num_right <= num_all or num_all < 1:
        raise ValueError(
            f"a share needs 0 <= right <= all and something at all, got {num_right} of {num_all}"
        )
    share, z2 = num_right / num_all, _Z95**2
    centre = (share + z2 / (2 * num_all)) / (1 + z2 / num_all)
    half = _Z95 * sqrt(share * (1 - share) / num_all + z2 / (4 * num_all**2)) / (1 + z2 / num_all)
    # Rounding must not push a bound past the share itself where the two are equal.
    return Interval(min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def mcnemar_p(wins: int, losses: int) -> float:
    """Returns the two-sided exact p-value of a paired comparison (McNemar 1947), 1.0 without differences.

    wins, losses: questions that only the one, or only the other of the two, answered right. If neither were
        better, each would fall to either side like a coin.
    """
    num_differing = wins + losses
    tail = sum(comb(num_differing, successes) for successes in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / (1 << num_differing))
