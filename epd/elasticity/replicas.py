"""How many workers of each role a cluster that can grow should have, by the same estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epd.elasticity.load import ClusterLoad, Roles


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


class ReplicaAdviser:
    """Wanted numbers of workers, with delays so that they do not follow every wave."""

    def __init__(self, config: ReplicaConfig | None = None) -> None:
        self.config = config or ReplicaConfig()

    def desired_replicas(self, now_s: float, load: ClusterLoad) -> Mapping[Roles, int]:
        """By the sets of roles that workers have now."""
        raise NotImplementedError
