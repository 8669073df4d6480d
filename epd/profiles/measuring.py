"""Measures a stage: chooses points and repeats, and summarises them. The action is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

import numpy as np

from epd.profiles.cost import Measurement, StageTable, fit_table

Action = Callable[[], object]
# perf_counter; or process_time where one thread computes, so that others on the machine do not count.
Clock = Callable[[], float]


def measurement(units: float, items: float, seconds: Sequence[float]) -> Measurement:
    """Returns the median and the spread between quartiles. Raises ValueError without runs."""
    low, middle, high = map(float, np.percentile(np.asarray(seconds), (25, 50, 75)))
    return Measurement(units, items, middle, high - low, len(seconds))


def timed(action: Action, clock: Clock = perf_counter) -> float:
    start = clock()
    action()
    return clock() - start


def measured(
    points: Iterable[tuple[float, float, Action]], num_repeats: int, clock: Clock = perf_counter
) -> list[Measurement]:
    """Runs every point in turn, num_repeats times, after one run that does not count.

    In turns, so that a machine that is busy for a while spoils one run of each point, not all of one.
    """
    listed = list(points)
    for _, _, action in listed:
        action()
    seconds = [[timed(action, clock) for _, _, action in listed] for _ in range(num_repeats)]
    return [
        measurement(units, items, column)
        for (units, items, _), column in zip(listed, zip(*seconds, strict=True), strict=True)
    ]


def table(
    units: str,
    items: str,
    points: Iterable[tuple[float, float, Action]],
    num_repeats: int,
    clock: Clock = perf_counter,
) -> StageTable:
    return fit_table(units, items, measured(points, num_repeats, clock))
