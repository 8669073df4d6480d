"""Combines decode steps of a simulated worker: as long as nothing else happens, many are one event."""

from __future__ import annotations

from dataclasses import dataclass

from epd.kv.scheduled_request import ScheduledRequest


@dataclass(slots=True)
class StepRun:
    """Combines decode steps of the same requests.

    base, context: ticks and tokens of the first
    num_allocated: steps whose blocks are taken
    """

    requests: list[ScheduledRequest]
    num_steps: int
    base: int
    context: int
    per_context: int
    num_allocated: int = 0

    def ticks(self, num_steps: int) -> int:
        pairs = len(self.requests) * (num_steps * (num_steps - 1) // 2)
        return num_steps * self.base + self.per_context * (num_steps * self.context + pairs)

    def steps_until(self, ticks: int) -> int:
        """Returns the least number of steps, at least 1, that take `ticks` or longer."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            if self.ticks(middle) >= ticks:
                high = middle
            else:
                low = middle + 1
        return low
