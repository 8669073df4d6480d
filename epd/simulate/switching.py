"""Role switching in a simulation: what a policy may see, and one simple policy.

The order of a switch is the paper's (EPD, section 3.4): offload, the worker gets nothing new and ends what it
has; migrate and onload, `switch_s`; then it takes its new role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from epd.routing import Stage


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What is known of one worker. encode_usage: share of the time, over the last looks, that it encoded."""

    name: str
    roles: frozenset[Stage]
    encode_usage: float
    num_requests: int
    is_switching: bool


@dataclass(frozen=True, slots=True)
class Switch:
    """A worker that is to take other roles."""

    worker: str
    roles: frozenset[Stage]


class SwitchPolicy(Protocol):
    """Looks at all workers every interval_s."""

    @property
    def interval_s(self) -> float: ...

    def decide(self, now_s: float, workers: Sequence[WorkerView], /) -> Switch | None: ...


@dataclass(frozen=True, slots=True)
class DecodePressure:
    """Turns encoders into decoders while decode batches are too large and encoders have time to spare.

    max_batch: mean requests per decode worker above which it acts. max_usage: of the encoders that would be
    left, so that it stops before they become the bottleneck. One switch at a time, so that each is seen to
    work before the next.
    """

    max_batch: float
    max_usage: float = 0.75
    interval_s: float = 2.0

    def decide(self, _now_s: float, workers: Sequence[WorkerView], /) -> Switch | None:
        encoders = [each for each in workers if each.roles == {"encode"}]
        decoders = [each for each in workers if each.roles == {"decode"}]
        if any(each.is_switching for each in workers) or len(encoders) < 2 or not decoders:
            return None
        batch = sum(each.num_requests for each in decoders) / len(decoders)
        usage = sum(each.encode_usage for each in workers) / (len(encoders) - 1)
        if batch <= self.max_batch or usage > self.max_usage:
            return None
        spare = min(encoders, key=lambda each: (each.num_requests, each.name))
        return Switch(spare.name, frozenset({"decode"}))
