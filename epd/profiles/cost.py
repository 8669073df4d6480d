"""Models the cost of a stage: one formula for all, its range of validity, and its fit.

    seconds = fixed + max(floor + experts read, per_unit x units) + read x units + per_item x items

    stage      units              items
    encode     patches            groups encoded together (batch)
    prefill    new tokens         pairs of a new token and one it attends to, past tokens included
    decode     sequences (batch)  context tokens of all sequences
    transfer   bytes              transfers
    video      source pixels      frames wanted

floor is the time to read the weights: below it, more units cost nothing (a roofline). Of experts those are
read that a unit chose: all of them by 1 - (1 - active share) ^ units, as if each choice were drawn evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from epd.types import Float64Array


@dataclass(frozen=True, slots=True)
class StageCost:
    """Holds the coefficients of the formula, seconds.

    read_s: to read what one unit has besides weights and items: windows and recurrent states
    experts_s: to read all experts. active_share: of the experts, that one unit chooses
    """

    fixed_s: float = 0.0
    floor_s: float = 0.0
    per_unit_s: float = 0.0
    per_item_s: float = 0.0
    read_s: float = 0.0
    experts_s: float = 0.0
    active_share: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= value < np.inf for value in self._seconds) or not 0 <= self.active_share <= 1:
            raise ValueError(f"costs must be finite and at least 0 s, and a share up to 1, got {self}")

    @property
    def _seconds(self) -> tuple[float, ...]:
        return self.fixed_s, self.floor_s, *self.slopes, self.read_s, self.experts_s

    @property
    def slopes(self) -> tuple[float, float]:
        return self.per_unit_s, self.per_item_s

    def times(self, factor: float) -> StageCost:
        scaled = StageCost(*(factor * each for each in self._seconds))
        return replace(scaled, active_share=self.active_share)

    def seconds(self, units: float, items: float = 0.0) -> float:
        idle_share = math.pow(1 - self.active_share, units)
        weights_s = self.floor_s + self.experts_s * (1 - idle_share)
        own_s = self.read_s * units + self.per_item_s * items
        return self.fixed_s + max(weights_s, self.per_unit_s * units) + own_s

    @property
    def added_s(self) -> float:
        """Returns the seconds that a unit adds where others read the weights."""
        return self.per_unit_s + self.read_s


@dataclass(frozen=True, slots=True)
class ValidRange:
    """Bounds a value from low to high, both included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"a range goes from 0 or more upward, got {self.low} to {self.high}")

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    @classmethod
    def of(cls, values: Sequence[float]) -> ValidRange:
        return cls(min(values), max(values))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Holds one point: the median of `num_repeats` runs. spread_s: between the quartiles."""

    units: float
    items: float
    median_s: float
    spread_s: float
    num_repeats: int

    def __post_init__(self) -> None:
        if self.median_s <= 0 or self.spread_s < 0 or self.num_repeats < 1:
            raise ValueError(f"a measurement needs a time above 0 and at least 1 repeat, got {self}")


@dataclass(frozen=True, slots=True)
class StageTable:
    """Describes the cost of one stage.

    measurements: empty where the cost was computed, not measured
    units, items: names of the counted quantities
    valid_units, valid_items: where the cost was measured or computed; elsewhere it is extrapolated
    error: mean absolute error of the cost on its measurements, relative
    """

    units: str
    items: str
    cost: StageCost
    valid_units: ValidRange
    valid_items: ValidRange
    error: float = 0.0
    measurements: tuple[Measurement, ...] = ()

    def times(self, factor: float) -> StageTable:
        """Returns the table with costs multiplied by a factor; measurements stay as they were."""
        return replace(self, cost=self.cost.times(factor))

    def is_valid(self, units: float, items: float = 0.0) -> bool:
        return self.valid_units.holds(units) and self.valid_items.holds(items)


def fit_table(units: str, items: str, measurements: Sequence[Measurement]) -> StageTable:
    """Fits the cost with the least squares of relative errors. Raises ValueError without a measurement."""
    if not measurements:
        raise ValueError(f"a cost by {units} and {items} needs at least 1 measurement")
    columns = np.array([(1.0, point.units, point.items) for point in measurements])
    seconds = np.array([point.median_s for point in measurements])
    fixed_s, per_unit_s, per_item_s = nonnegative_fit(columns / seconds[:, None], np.ones(len(seconds)))
    cost = StageCost(fixed_s, 0.0, per_unit_s, per_item_s)
    errors = [abs(cost.seconds(point.units, point.items) / point.median_s - 1) for point in measurements]
    return StageTable(
        units,
        items,
        cost,
        ValidRange.of([point.units for point in measurements]),
        ValidRange.of([point.items for point in measurements]),
        float(np.mean(errors)),
        tuple(measurements),
    )


def fit_roofline(units: str, items: str, points: Sequence[Measurement]) -> StageTable:
    """Fits a cost with a floor: the smallest points, as many as leave the least error, but two of all."""
    found = [_above(units, items, points, number) for number in range(max(1, len(points) - 1))]
    return min(found, key=lambda each: each.error)


def _above(units: str, items: str, points: Sequence[Measurement], num_below: int) -> StageTable:
    """Fits all points but the first, which the mean of their times is the floor of."""
    whole, cost = fit_table(units, items, points), fit_table(units, items, points[num_below:]).cost
    floor_s = sum(point.median_s for point in points[:num_below]) / max(num_below, 1)
    cost = replace(cost, floor_s=max(0.0, floor_s - cost.fixed_s))
    errors = [abs(cost.seconds(point.units, point.items) / point.median_s - 1) for point in points]
    return replace(whole, cost=cost, error=sum(errors) / len(errors))


def fit_experts(units: str, items: str, points: Sequence[Measurement], active_share: float) -> StageTable:
    """Fits a cost that reads the experts its units choose. active_share: of them, that a unit chooses"""
    whole, seconds = fit_table(units, items, points), np.array([point.median_s for point in points])
    columns = np.array(
        [(1.0, 1 - (1 - active_share) ** each.units, each.units, each.items) for each in points]
    )
    fixed_s, experts_s, read_s, per_item_s = nonnegative_fit(columns / seconds[:, None], np.ones(len(points)))
    cost = StageCost(
        fixed_s, per_item_s=per_item_s, read_s=read_s, experts_s=experts_s, active_share=active_share
    )
    errors = [abs(cost.seconds(point.units, point.items) / point.median_s - 1) for point in points]
    return replace(whole, cost=cost, error=sum(errors) / len(errors))


def nonnegative_fit(columns: Float64Array, target: Float64Array) -> list[float]:
    """Fits least squares with coefficients of at least 0: the best over every subset of columns."""
    best, least = np.zeros(columns.shape[1]), np.inf
    for chosen in product((False, True), repeat=columns.shape[1]):
        found = np.zeros(columns.shape[1])
        if any(chosen):
            found[list(chosen)] = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
        residual = float(((columns @ found - target) ** 2).sum())
        if (found >= 0).all() and residual < least:
            best, least = found, residual
    return [float(value) for value in best]
