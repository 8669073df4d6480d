"""Measures a stage, whose action is passed in, and the current speed of a core.

The speed is that of the same small work, repeated, by the CPU time that it takes. Cores of rented machines
share hardware with other tenants. Their use is in no load average, but the same work takes up to half as long
again meanwhile. A profile keeps the speed that it was measured at.
"""

from __future__ import annotations

import time
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


_PIECE = 20_000


def piece_s() -> float:
    """Returns the CPU seconds of a piece of work, on this thread."""
    start_s = time.thread_time()
    sum(range(_PIECE))
    return time.thread_time() - start_s


def core_speed(seconds: float) -> float:
    """Measures pieces of work per CPU second, for the given number of seconds."""
    end_s, taken = time.perf_counter() + seconds, [piece_s()]
    while time.perf_counter() < end_s:
        taken.append(piece_s())
    return len(taken) / sum(taken)
