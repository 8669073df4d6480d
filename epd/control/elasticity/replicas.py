"""How many workers of each role a cluster that can grow should have, by the same estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from epd.control.elasticity.load import ClusterLoad, Roles, time_share


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """In Ray Serve's words. target_utilisation: share of their time that workers should be busy.

    drain_s: in which what has queued should be done. delays: a change is proposed once it was wanted so long.
    """

    min_replicas: int = 1
    max_replicas: int = 64
    target_utilisation: float = 0.7
    drain_s: float = 15.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(f"replicas go from 1 upward, got {self.min_replicas} to {self.max_replicas}")
        if not 0 < self.target_utilisation <= 1 or self.drain_s <= 0:
            raise ValueError(f"utilisation lies in (0, 1] and drain_s above 0, got {self}")


class ReplicaAdviser:
    """Wanted numbers of workers, with delays so that they do not follow every wave."""

    def __init__(self, config: ReplicaConfig | None = None) -> None:
        self.config = config or ReplicaConfig()
        self._since_s: dict[Roles, tuple[int, float]] = {}  # direction of a change, and since when

    def desired_replicas(self, now_s: float, load: ClusterLoad) -> Mapping[Roles, int]:
        """By the sets of roles that workers have now."""
        counts: dict[Roles, int] = {}
        for worker in load.workers:
            counts[worker.roles] = counts.get(worker.roles, 0) + 1
        return {roles: self._delayed(now_s, roles, num, load) for roles, num in counts.items()}

    def _delayed(self, now_s: float, roles: Roles, num: int, load: ClusterLoad) -> int:
        wanted = self._wanted(roles, num, load) if load.is_known else num
        direction = (wanted > num) - (wanted < num)
        if self._since_s.get(roles, (0, now_s))[0] != direction or not direction:
            self._since_s[roles] = (direction, now_s)
        wanted_for_s = now_s - self._since_s[roles][1]
        delay_s = self.config.upscale_delay_s if direction > 0 else self.config.downscale_delay_s
        return wanted if direction and wanted_for_s >= delay_s else num

    def _wanted(self, roles: Roles, num: int, load: ClusterLoad) -> int:
        """For what is predicted to come, and for what has queued beyond one request per worker."""
        config, needs = self.config, {stage: each.need for stage, each in load.stages.items()}
        workers = 0.0
        for stage in roles & load.stages.keys():
            each = load.stages[stage]
            mine = num * time_share(roles, stage, needs) / each.num_workers if each.num_workers else 1.0
            waiting = max(0.0, each.num_requests - each.num_workers) / max(each.num_requests, 1.0)
            backlog = each.queued_s * waiting / config.drain_s
            workers += mine * (each.demand / config.target_utilisation + backlog)
        # A hair above a whole number is rounding, not load.
        return min(max(math.ceil(workers - 1e-6), config.min_replicas), config.max_replicas)
