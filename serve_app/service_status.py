"""Describes the state of the service: its workers, their changes of roles, and what follows the load.

Everything here can be pickled. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from epd.control.elasticity.controller import Decision
from epd.control.elasticity.replicas import ReplicaAdvice
from epd.control.retention import LevelChange
from epd.serve_app.worker_info import MemoryUse


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The current state of one worker.

    roles: one letter each: v video decoding, e encode, p prefill, d decode
    num_waiting, num_running: requests or groups queued and running there
    kv_usage, encoder_cache_usage: shares of its memory in use, None if it has no such memory
    num_role_switches: since it started
    is_switching: whether it is giving up roles, and takes no work for them
    transports: the way that its embeddings, keys and values last took to other workers, by name
    memory: what it has on its device; None for a media worker
    walls: around its processes that read media, by `epd.video.children.walls`; None if it has none
    """

    name: str
    roles: str
    is_alive: bool = True
    num_waiting: int = 0
    num_running: int = 0
    kv_usage: float | None = None
    encoder_cache_usage: float | None = None
    num_role_switches: int = 0
    is_switching: bool = False
    transports: Mapping[str, str] = field(default_factory=dict)
    memory: MemoryUse | None = None
    walls: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RoleSwitch:
    """The result of a worker's change of roles.

    before, after: letters of its roles
    at_s: its start, Unix time
    offload_s to announce_s: seconds of the phases, see `role_switch`
    weights_s: the part of onload spent on loading weights
    num_handed_on: requests and groups passed to other workers before they were begun
    num_moved: answers moved while running
    num_redone: requests and groups that were retried
    error: why it kept its former roles; empty if it has the new ones
    """

    worker: str
    before: str
    after: str
    at_s: float
    offload_s: float
    migrate_s: float
    onload_s: float
    announce_s: float
    weights_s: float = 0.0
    num_handed_on: int = 0
    num_moved: int = 0
    num_redone: int = 0
    error: str = ""

    @property
    def kind(self) -> str:
        """Returns the kind of switch, as in e->p."""
        return f"{self.before}->{self.after}"

    @property
    def total_s(self) -> float:
        return self.offload_s + self.migrate_s + self.onload_s + self.announce_s

    def line(self) -> str:
        """Formats the switch as a line for a log."""
        return (
            f"worker={self.worker} switch={self.kind} total_s={self.total_s:.3f} "
            f"offload_s={self.offload_s:.3f} migrate_s={self.migrate_s:.3f} onload_s={self.onload_s:.3f} "
            f"handed_on={self.num_handed_on} moved={self.num_moved} redone={self.num_redone} "
            f"error={self.error or '-'}"
        )


@dataclass(frozen=True, slots=True)
class SwitchTotals:
    """Totals of all switches of one kind since the start. Seconds: sums over the successful ones."""

    kind: str
    num_done: int = 0
    num_failed: int = 0
    offload_s: float = 0.0
    migrate_s: float = 0.0
    onload_s: float = 0.0
    announce_s: float = 0.0

    def plus(self, switch: RoleSwitch) -> SwitchTotals:
        """Returns the totals including one more switch."""
        if switch.error:
            return replace(self, num_failed=self.num_failed + 1)
        return SwitchTotals(
            self.kind,
            self.num_done + 1,
            self.num_failed,
            self.offload_s + switch.offload_s,
            self.migrate_s + switch.migrate_s,
            self.onload_s + switch.onload_s,
            self.announce_s + switch.announce_s,
        )


@dataclass(frozen=True, slots=True)
class RetentionStatus:
    """The share of visual tokens that the load allows now.

    predicted_ttft_s: of a prompt arriving at the last update
    num_changes: since the start
    changes: the last ones, oldest first, at Unix times
    """

    level: float
    predicted_ttft_s: float
    num_changes: int
    changes: tuple[LevelChange, ...]


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The current state of the service.

    is_ready: whether every role that an answer needs has a worker
    topology: as in `2e1p1d`
    counters: totals since the start, under Prometheus names without prefix, such as encoder_cache_hits;
    each is exported as epd_<name>_total
    switches: the last changes of roles, oldest first
    switch_totals: of all of them, by kind
    num_waiting: requests that no worker has taken yet
    decisions: whether the load required a change of roles, and why; the last ones, oldest first
    advice: how many replicas there should be of each deployment that follows the load, and why
    retention: None if it does not follow the load
    """

    is_ready: bool
    topology: str
    workers: tuple[WorkerStatus, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    num_waiting: int = 0
    decisions: tuple[Decision, ...] = ()
    advice: Mapping[str, ReplicaAdvice] = field(default_factory=dict)
    switches: tuple[RoleSwitch, ...] = ()
    switch_totals: tuple[SwitchTotals, ...] = ()
    retention: RetentionStatus | None = None
