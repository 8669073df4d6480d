"""Learns how fast each worker does its stages from the work that it has done: choices weigh by it."""

from __future__ import annotations

from epd.control.recent import DecayedMean
from epd.topology import Stage

# Seconds of a worker's own work after which older work has lost most of its weight.
_MEMORY_S = 3.0


class Speeds:
    """Keeps units per second of work, by worker and stage. A worker that is not known is as the fastest."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, Stage], tuple[float, float]] = {}
        self._means: dict[tuple[str, Stage], DecayedMean] = {}

    def add(self, worker: str, stage: Stage, units: float, busy_s: float) -> None:
        """Takes totals of a worker since its start: units done, and the seconds that it worked on them."""
        key = worker, stage
        before = self._totals.get(key, (0.0, 0.0))
        if units < before[0] or busy_s < before[1]:  # it was started again
            before = 0.0, 0.0
            self._means.pop(key, None)
        self._totals[key] = units, busy_s
        more, seconds = units - before[0], busy_s - before[1]
        if more > 0 and seconds > 0:
            self._means.setdefault(key, DecayedMean(_MEMORY_S)).add(more, seconds, seconds)

    def relative(self, worker: str, stage: Stage) -> float:
        """Returns the worker's speed as a share of the fastest worker's that is known."""
        own = self._means.get((worker, stage))
        if own is None or not own.value:
            return 1.0
        known = (mean.value or 0.0 for (_, other), mean in self._means.items() if other == stage)
        return own.value / max(known)

    def forget(self, worker: str) -> None:
        """Forgets a worker that is lost."""
        for key in [key for key in self._totals if key[0] == worker]:
            del self._totals[key]
            self._means.pop(key, None)
