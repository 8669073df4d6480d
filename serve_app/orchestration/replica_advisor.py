"""Advises how many stage and media workers there should be, from the load of all fronts; the leader does.

load, media workers --> StageReplicas, MediaReplicas --> advice --> board --> replicas --> Serve's policies
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from epd.control.elasticity import (
    ClusterTraffic,
    MediaReplicas,
    MediaSample,
    ReplicaAdvice,
    ReplicaConfig,
    StageReplicas,
)
from epd.topology import parse_topology

# A reason that says the same of other figures is given out again only this often.
_REFRESH_S = 5.0
# Workers that are there already need this time to be seen by a front that has just begun to lead.
_SETTLE_S = 10.0
Bounds = tuple[int, int]


class ReplicaAdvisor:
    """Advises numbers for deployments that Serve scales.

    is_wanted: whether Serve scales any deployment
    config: delays; the bounds are Serve's
    settle_s: from the first look of a leader to its first advice
    """

    def __init__(self, config: ReplicaConfig | None = None, settle_s: float = _SETTLE_S) -> None:
        self.config = config or ReplicaConfig()
        self.is_wanted = False
        self.advice: Mapping[str, ReplicaAdvice] = {}
        self._settle_s = settle_s
        self._stage: StageReplicas | None = None
        self._media: MediaReplicas | None = None
        self._since_s: float | None = None

    def follow(self, bounds: Mapping[str, Bounds], topology: str) -> None:
        """Takes Serve's bounds, of deployments that it scales. topology: for its sets of roles."""
        stage, media = self._bounded(bounds.get("Stage")), self._bounded(bounds.get("Media"))
        if stage != (self._stage and self._stage.config):
            self._stage = None if stage is None else StageReplicas(stage, parse_topology(topology))
        if media != (self._media and self._media.config):
            self._media = None if media is None else MediaReplicas(media)
        self.is_wanted = self._stage is not None or self._media is not None

    def _bounded(self, bounds: Bounds | None) -> ReplicaConfig | None:
        """Returns None without bounds. Serve may scale to none; an answer needs a worker."""
        if bounds is None:
            return None
        least = max(1, bounds[0])
        return replace(self.config, min_replicas=least, max_replicas=max(least, bounds[1]))

    def look(self, traffic: ClusterTraffic, media: Sequence[MediaSample]) -> None:
        """Advises on a load. media: all media workers that are alive."""
        if self._since_s is None:
            self._since_s = traffic.now_s
        if traffic.now_s - self._since_s < self._settle_s:
            return
        if self._stage is not None and traffic.is_known:
            self._note("Stage", self._stage.advise, traffic)
        if self._media is not None and media:
            self._note("Media", self._media.advise, traffic.now_s, media)

    def _note(self, deployment: str, advise: Callable[..., ReplicaAdvice], *seen: object) -> None:
        advice, before = advise(*seen), self.advice.get(deployment)
        if advice.verdict == "unknown load":
            return
        is_same = before is not None and (before.verdict, before.num_replicas) == (
            advice.verdict,
            advice.num_replicas,
        )
        if before is None or not is_same or advice.at_s - before.at_s >= _REFRESH_S:
            self.advice = {**self.advice, deployment: advice}

    def stop(self, given: Mapping[str, ReplicaAdvice]) -> None:
        """Shows the advice that another front gives, which leads."""
        self.advice = given
        self._since_s = None
