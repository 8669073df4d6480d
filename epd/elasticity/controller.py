"""Which worker is to take which roles, and why: decided on the load of a cluster. Time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from epd.elasticity.load import ClusterLoad, Roles

# Why nothing was switched; "switch" where something was.
Verdict = Literal[
    "switch",
    "unknown load",
    "in flight",
    "cooldown",
    "no candidate",
    "no gain",
    "below margin",
    "unconfirmed",
]
PURE_ROLES: tuple[Roles, ...] = (frozenset({"encode"}), frozenset({"prefill"}), frozenset({"decode"}))


@dataclass(frozen=True, slots=True)
class Switch:
    """A worker that is to take other roles."""

    worker: str
    roles: Roles


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """roles: sets of roles between which workers may change; a worker with others is left as it is.

    horizon_s: over which gain and cost are weighed. load_s: from the end of a drain to the new role.
    max_drain_s: after which a worker that drains is rid of its work by other means. margin: by which the gain
    must exceed the cost, 0.5: by half of it; it doubles with each switch back in memory_s. min_gain: share of
    all the time that requests would spend, in [0, 1). num_confirm: looks in a row that must say the same.
    cooldown_s: after a switch. dwell_s: a worker keeps its roles. min_workers: of each stage.
    max_in_flight: switches at a time. backoff_s: after a switch of a worker that failed; doubles each time.
    """

    roles: tuple[Roles, ...] = PURE_ROLES
    interval_s: float = 2.0
    horizon_s: float = 30.0
    load_s: float = 0.7
    max_drain_s: float = 30.0
    margin: float = 0.5
    min_gain: float = 0.05
    num_confirm: int = 2
    cooldown_s: float = 4.0
    dwell_s: float = 20.0
    memory_s: float = 300.0
    min_encode: int = 1
    min_prefill: int = 1
    min_decode: int = 1
    max_in_flight: int = 1
    backoff_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided and why. gain_s, cost_s: of the best switch that was weighed, in seconds that requests
    spend, all together, over the horizon. reason: a line for people."""

    at_s: float
    verdict: Verdict
    switch: Switch | None
    old_roles: Roles | None
    gain_s: float
    cost_s: float
    reason: str


class RoleController:
    """Asked every config.interval_s. A switch that it returns is in flight until it is told how it ended."""

    def __init__(self, config: ControllerConfig | None = None) -> None:
        self.config = config or ControllerConfig()

    def decide(self, now_s: float, load: ClusterLoad) -> Switch | None:
        """The switch to begin now, if any."""
        raise NotImplementedError

    def succeeded(self, now_s: float, worker: str) -> None:
        """The worker has its new roles. Unknown workers are ignored."""
        raise NotImplementedError

    def failed(self, now_s: float, worker: str) -> None:
        """The worker is as it was, or gone: it is left alone for a while, longer each time."""
        raise NotImplementedError

    @property
    def decisions(self) -> Sequence[Decision]:
        """The last ones, oldest first; equal ones in a row are told once."""
        raise NotImplementedError

    @property
    def in_flight(self) -> frozenset[str]:
        """Workers whose switch has not ended."""
        raise NotImplementedError
