"""Totals the work of a stage of a worker, for `epd.control.elasticity`."""

from __future__ import annotations

from dataclasses import dataclass

from epd.control.elasticity.cluster import StageSample
from epd.simulate.clock import seconds_of


@dataclass(slots=True)
class WorkDone:
    """Holds totals since the worker took the role: units, rounds, and ticks spent on them."""

    units: int = 0
    rounds: int = 0
    ticks: int = 0

    def add(self, units: int, ticks: int, rounds: int = 1) -> None:
        """Adds rounds in which some work was done."""
        if units:
            self.units += units
            self.rounds += rounds
            self.ticks += ticks

    def sample(self, num_requests: int, queued_units: int = 0) -> StageSample:
        return StageSample(num_requests, queued_units, self.units, self.rounds, seconds_of(self.ticks))
