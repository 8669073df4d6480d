"""Assigns roles to workers that come, finds who replaces those that go, and lays out roles for a load.

wanted  2e1p1d    present  e0 p0 d0       a newcomer gets e: the topology lacks it
wanted  2e1p1d    present  e0 e1 p0 d0    the next gets e: so many keep the topology's ratio best
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from epd.control.elasticity.cluster import Roles, WorkerStanding, divided
from epd.control.elasticity.controller import PURE_ROLES, Switch
from epd.topology import STAGES, Stage, Topology, role_letters


def switchable_roles(topology: Topology) -> tuple[Roles, ...]:
    """Returns the sets of roles between which workers of a topology may change.

    These are the single roles; and where a set has several, that set and the parts of it.
    """
    merged = {group.roles for group in topology.groups if len(group.roles) > 1}
    parts = {frozenset(part) for roles in merged for part in combinations(sorted(roles), 2)}
    return (*PURE_ROLES, *sorted(merged | parts, key=role_letters))


def roles_for_newcomer(
    wanted: Topology,
    present: Sequence[Roles],
    *,
    here: Sequence[Roles] = (),
) -> Roles:
    """Returns the roles of a worker that joins.

    A stage without any worker comes first, then the roles of which the topology has the largest share
    missing. Beyond the topology its ratio is kept. Roles that the topology does not name are never given.
    Of roles that are equally missing it gets those that its machine has least of: a lost machine should take
    no stage with it.

    wanted: topology to fill
    present: roles of each worker that is there or starting, without those that leave
    here: roles of those that are on the same machine
    """
    kinds, counts, near = _kinds(wanted), Counter(present), Counter(here)
    served = frozenset[Stage]().union(*present)
    missing = [roles for roles in kinds if roles - served]
    if missing:
        return max(missing, key=lambda roles: (len(roles - served), kinds[roles]))
    return max(kinds, key=lambda roles: (_lack(kinds, counts, roles), -near[roles]))


def layout_for(needed: Mapping[Stage, float], wanted: Topology, max_workers: int) -> Counter[Roles]:
    """Returns the fewest workers of each kind in the topology that give every stage the workers it needs.

    needed: workers that each stage needs, idle time included
    max_workers: bound of the sum, unless the topology has more kinds
    """
    kinds = _kinds(wanted)
    counts = Counter(dict.fromkeys(kinds, 1))
    while counts.total() < max_workers and _shares(needed, counts.elements())[0] > 1:
        counts[_most_helpful(needed, kinds, counts)] += 1
    return counts


def replacement_for(workers: Sequence[WorkerStanding], leaving: Collection[str]) -> Switch | None:
    """Returns the switch that keeps every stage served when workers leave, None if none is needed or can be.

    Serve chooses which replica stops, and may choose the last worker of a stage. The worker that drains
    soonest then takes over its roles, if its own are served by others too.

    workers: all that are alive, those that leave included
    leaving: names of those that leave
    """
    staying = [each for each in workers if each.name not in leaving]
    served = frozenset[Stage]().union(*(each.roles for each in staying))
    for gone in (each for each in workers if each.name in leaving and each.roles - served):
        spare = [each for each in staying if not each.is_switching and _is_spare(each, staying, gone.roles)]
        if spare:
            chosen = min(spare, key=lambda each: (each.drain_s, each.name))
            return Switch(chosen.name, gone.roles)
    return None


def helper_for(workers: Sequence[WorkerStanding]) -> Switch | None:
    """Returns the switch by which a worker encodes besides, where nobody else does; None if none can.

    It prefills, so that embeddings stay where they are needed, and drains soonest.
    """
    able = [each for each in workers if "prefill" in each.roles and not each.is_switching]
    chosen = min(able, key=lambda each: (each.drain_s, each.name), default=None)
    return None if chosen is None else Switch(chosen.name, chosen.roles | {"encode"})


def _is_spare(worker: WorkerStanding, staying: Sequence[WorkerStanding], taken: Roles) -> bool:
    """Returns whether every stage of the worker is served by others, or by itself with the roles it takes."""
    others = frozenset[Stage]().union(*(each.roles for each in staying if each.name != worker.name))
    return not worker.roles - others - taken


def _kinds(wanted: Topology) -> Counter[Roles]:
    """Returns how many workers of each set of roles the topology names, in its order."""
    kinds: Counter[Roles] = Counter()
    for group in wanted.groups:
        kinds[group.roles] += group.num_workers
    return kinds


def _lack(kinds: Mapping[Roles, int], counts: Mapping[Roles, int], roles: Roles) -> float:
    """Returns how much the roles are lacking: at least 1 up to the topology, below 1 beyond it.

    The highest quotients, one worker after another, fill a topology exactly and keep its ratio (D'Hondt).
    """
    return kinds[roles] / (counts[roles] + 1)


def _most_helpful(
    needed: Mapping[Stage, float], kinds: Mapping[Roles, int], counts: Mapping[Roles, int]
) -> Roles:
    """Returns the roles with which the stage that needs most needs least, then the next one and so on."""
    present = list(Counter(counts).elements())

    def rank(roles: Roles) -> tuple[list[float], float]:
        return _shares(needed, [*present, roles]), -_lack(kinds, counts, roles)

    return min(kinds, key=rank)


def _shares(needed: Mapping[Stage, float], workers: Iterable[Roles]) -> list[float]:
    """Returns the share of each stage's workers that is needed, the largest first."""
    capacity = divided(workers, {stage: needed.get(stage, 0.0) for stage in STAGES})
    return sorted(
        (_share(needed.get(stage, 0.0), capacity.get(stage, 0.0)) for stage in STAGES), reverse=True
    )


def _share(needed: float, capacity: float) -> float:
    return needed / capacity if capacity else math.inf if needed else 0.0
