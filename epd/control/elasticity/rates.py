"""Learns the time of a stage's rounds and units from the work in progress."""

from __future__ import annotations

import math
from collections.abc import Mapping

from epd.control.elasticity.cluster import StageSample
from epd.control.recent import DecayedMean
from epd.profiles.cost import StageCost
from epd.topology import Stage

_PRIOR_ROUNDS = 5.0  # weight of prior costs
# Share of the mean number of units, below which a spread carries no information on the slope.
_LEAST_SPREAD = 0.1
_ROUNDS_MEMORY = 3.0  # a slope needs rounds of many sizes, so they are remembered longer


class UnitCost:
    """Learns seconds per unit, independent of rounds: for a stage whose rounds do not grow with its load.

    It decays by seconds of work, so that it survives a quiet night.
    """

    def __init__(self, memory_s: float, prior_s: float | None = None, prior_units: float = 1.0) -> None:
        """prior_s is known per unit; it counts for a few rounds of typical size."""
        weight = 0.0 if prior_s is None else _PRIOR_ROUNDS * prior_units
        self._mean = DecayedMean(memory_s, (prior_s or 0.0) * weight, weight)

    def add(self, units: float, busy_s: float) -> None:
        self._mean.add(busy_s, units, busy_s)

    @property
    def unit_s(self) -> float | None:
        return self._mean.value


class RoundCost:
    """Fits a line through the times of rounds by their units: for a stage that batches.

    Uses least squares with forgetting. While the sizes of rounds have hardly differed, the slope stays as it
    was known or learned before; without either, half of a round's time is attributed to its units.
    """

    def __init__(self, memory_s: float, prior: tuple[float, float] | None = None) -> None:
        """prior is (round_s, unit_s)."""
        self._memory_s = memory_s
        self._prior = prior
        self._slope = prior[1] if prior is not None else None
        self._weight = self._units = self._seconds = 0.0
        self._squares = self._products = 0.0

    def add(self, rounds: int, units: float, busy_s: float) -> None:
        """Adds rounds of about the same size."""
        if rounds < 1 or units <= 0:
            return
        size, seconds = units / rounds, busy_s / rounds
        keep = math.exp(-busy_s / self._memory_s)
        self._weight = self._weight * keep + rounds
        self._units = self._units * keep + rounds * size
        self._seconds = self._seconds * keep + rounds * seconds
        self._squares = self._squares * keep + rounds * size * size
        self._products = self._products * keep + rounds * size * seconds
        self._slope = self._fitted_slope()

    def _fitted_slope(self) -> float:
        size, seconds = self._units / self._weight, self._seconds / self._weight
        most = seconds / size
        known = min(self._slope if self._slope is not None else most / 2, most)
        spread = self._squares / self._weight - size * size
        doubt = (_LEAST_SPREAD * size) ** 2
        if spread < doubt:  # what the times of equal rounds differ by is noise
            return known
        product = self._products / self._weight - size * seconds
        return min(max((product + doubt * known) / (spread + doubt), 0.0), most)

    @property
    def line(self) -> tuple[float, float] | None:
        """Returns (round_s, unit_s); None before anything is known."""
        if not self._weight or self._slope is None:
            return self._prior
        round_s = (self._seconds - self._slope * self._units) / self._weight
        return max(0.0, round_s), self._slope


class StageCosts:
    """Learns seconds of each stage's units from the work that workers have done."""

    def __init__(self, memory_s: float, known: Mapping[Stage, StageCost]) -> None:
        """memory_s is in seconds of work; known holds prior costs, by units."""
        self._memory_s = memory_s
        self._known = known
        self._units: dict[Stage, UnitCost] = {}
        decode = known.get("decode")
        self._decode = RoundCost(_ROUNDS_MEMORY * memory_s, None if decode is None else _line(decode))

    def add(self, stage: Stage, done: StageSample) -> None:
        """Adds the work of one worker since the last look."""
        if stage == "decode":
            self._decode.add(done.num_rounds, done.done_units, done.busy_s)
        elif done.done_units > 0:
            self._of(stage, done.done_units / max(done.num_rounds, 1)).add(done.done_units, done.busy_s)

    @property
    def decode(self) -> tuple[float, float] | None:
        """Returns (seconds of a round, and of each request in it); None before anything is known."""
        return self._decode.line

    def unit_s(self, stage: Stage, typical_units: float) -> float | None:
        """Returns seconds per unit of encode or prefill. typical_units: of a round, for prior costs."""
        return self._of(stage, typical_units).unit_s

    def _of(self, stage: Stage, typical_units: float) -> UnitCost:
        if stage not in self._units:
            units, cost = max(typical_units, 1.0), self._known.get(stage)
            prior_s = None if cost is None else cost.seconds(units, 1.0) / units
            self._units[stage] = UnitCost(self._memory_s, prior_s, units)
        return self._units[stage]


def _line(cost: StageCost) -> tuple[float, float]:
    """Returns the line of decode: while reading the weights takes longer, another sequence costs nothing."""
    return cost.fixed_s + cost.floor_s + cost.experts_s, 0.0 if cost.floor_s else cost.per_unit_s
