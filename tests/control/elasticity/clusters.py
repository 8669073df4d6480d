"""Clusters and loads as a test wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd.control.elasticity.cluster import ClusterTraffic, Roles, StageNeed, StageTraffic, WorkerStanding
from epd.topology import STAGES, Stage, parse_topology

# A request takes 1 s of encoding, 0.2 s of prefill, and 200 steps of 10 ms and 2 ms for each of its kind.
NEEDS: Mapping[Stage, StageNeed] = {
    "encode": StageNeed(1.0, part_s=1.0),
    "prefill": StageNeed(1.0, part_s=0.2),
    "decode": StageNeed(1.0, 200.0, 0.01, 0.002),
}


def roles_of(topology: str) -> dict[str, Roles]:
    return {spec.name: spec.roles for spec in parse_topology(topology).workers()}


def cluster(
    workers: Mapping[str, Roles],
    *,
    rate: float = 0.0,
    requests: Mapping[Stage, float] | None = None,
    peaks: Mapping[Stage, float] | None = None,
    needs: Mapping[Stage, StageNeed] = NEEDS,
    switching: Sequence[str] = (),
    drain_s: float = 0.5,
    is_known: bool = True,
    now_s: float = 0.0,
) -> ClusterTraffic:
    """requests: by stage, all new there. rate: of arrivals. drain_s: of each worker."""
    stages = {}
    for stage in STAGES:
        need, num = needs[stage], (requests or {}).get(stage, 0.0)
        num_workers = sum(1 / len(roles) for roles in workers.values() if stage in roles)
        demand = rate * need.share * need.request_s
        peak = max(demand, (peaks or {}).get(stage, 0.0))
        stages[stage] = StageTraffic(
            stage, need, num_workers, num, num * need.request_s, 0.5, demand, peak, peak
        )
    standings = tuple(
        WorkerStanding(name, roles, 0.0, {min(roles): drain_s}, 1, None, name in switching)
        for name, roles in workers.items()
    )
    return ClusterTraffic(now_s, rate, 0.0, 20.0, 0, stages, standings, is_known)
