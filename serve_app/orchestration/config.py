"""Configures an orchestrator."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from string import digits

from epd.control.elasticity.controller import ControllerConfig
from epd.control.loss_policy import LossLimits
from epd.control.retention import RetentionConfig
from epd.encode.sharding import Sharding


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """Limits of role switches.

    drain_s: seconds after which remaining work is retried elsewhere
    leave_s: the same for a worker that leaves for good
    limit_s: seconds after which the whole switch is rolled back
    """

    drain_s: float = 2.0
    leave_s: float = 10.0
    limit_s: float = 30.0


@dataclass(frozen=True, slots=True)
class OrchestratorConfig:
    """Configures an `Orchestrator`.

    max_waiting: requests in the queue for room
    max_wait_s: time in that queue for a request without a deadline
    max_attempts: losses of one request, of workers of any role
    losses: which requests are to blame for losses, and refused for a while
    max_prefills: requests whose prompt one worker computes at a time
    unavailable_s: how long a request waits while a role has no worker
    encode_fallback_s: after which a worker that prefills encodes too, while no other does; None for never
    stall_timeout_s: after which a silent attempt is lost, see `stalled`; longer than a worker's step
    max_backlog_patches: see `EncodeDispatcher`
    num_planning_threads: threads that tokenise what is not short
    sharding: of one request's groups over the encoders
    switching: limits of role switches
    cache_dir: folder in which encoders may have groups; None if they keep none
    classes: names of classes of workers: then speeds weigh, and a worker of a class keeps its roles
    elastic, retention: how roles, and the share of visual tokens, follow the load; None if they do not
    """

    max_waiting: int = 256
    max_wait_s: float = 120.0
    max_attempts: int = 5
    losses: LossLimits = field(default_factory=LossLimits)
    max_prefills: int = 16
    unavailable_s: float = 60.0
    encode_fallback_s: float | None = None
    stall_timeout_s: float = 180.0
    max_backlog_patches: int = 32_768
    num_planning_threads: int = 2
    sharding: Sharding = "groups"
    switching: SwitchLimits = field(default_factory=SwitchLimits)
    cache_dir: Path | None = None
    classes: frozenset[str] = frozenset()
    elastic: ControllerConfig | None = None
    retention: RetentionConfig | None = None

    def keeps_roles(self, worker: str) -> bool:
        """Returns whether a worker is of a class, after which it is named, with a number."""
        return worker.rstrip(digits) in self.classes
