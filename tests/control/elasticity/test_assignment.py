"""Which roles a newcomer gets, how many workers of each a load needs, and who replaces those that go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.control.elasticity.assignment import helper_for, layout_for, replacement_for, roles_for_newcomer
from epd.control.elasticity.cluster import Roles
from epd.control.elasticity.controller import Switch
from epd.topology import STAGES, Topology, WorkerGroup, parse_topology, role_letters
from tests.control.elasticity.clusters import cluster, roles_of

E, P, D = (frozenset({stage}) for stage in STAGES)
PD: Roles = P | D


def newcomers(topology: str, present: str, num: int) -> str:
    """The letters that so many workers get, one after another, in a fleet that has some."""
    fleet = [] if not present else list(roles_of(present).values())
    for _ in range(num):
        fleet.append(roles_for_newcomer(parse_topology(topology), fleet))
    return " ".join(role_letters(each) for each in fleet[len(fleet) - num :])


# A fleet is filled


@pytest.mark.parametrize(
    ("topology", "present", "given_roles"),
    [
        ("1e1p1d", "", "e p d"),
        ("2e1p1d", "", "e p d e"),
        ("1epd", "", "epd"),
        ("2ep1d", "", "ep d ep"),
        ("4e2p2d", "1e1p1d", "e e e p d"),
        ("2e1p1d", "1e1p1d", "e"),
        ("1e1p3d", "3e1p1d", "d d"),
    ],
)
def test_a_newcomer_gets_what_the_topology_lacks(topology: str, present: str, given_roles: str) -> None:
    assert newcomers(topology, present, len(given_roles.split())) == given_roles


def test_a_stage_without_a_worker_comes_before_a_larger_gap() -> None:
    """Seven encoders of eight are missing, but nobody decodes."""
    assert roles_for_newcomer(parse_topology("8e1p1d"), [E, P]) == D


@pytest.mark.parametrize("machines", ["AAABBB", "ABABAB", "AABBAB", "ABBAAB", "BAABBA"])
def test_each_of_two_machines_gets_a_worker_of_each_stage(machines: str) -> None:
    """Whatever the order in which workers join: none takes all workers of a stage with it."""
    fleet: list[tuple[str, Roles]] = []
    for machine in machines:
        here = [roles for each, roles in fleet if each == machine]
        wanted = parse_topology("2e2p2d")
        fleet.append((machine, roles_for_newcomer(wanted, [roles for _, roles in fleet], here=here)))
    assert Counter(fleet) == Counter((machine, roles) for machine in "AB" for roles in (E, P, D))


def test_who_does_two_stages_at_once_serves_both() -> None:
    """Somebody has merged two roles: only encode is missing, then the topology's own are."""
    wanted = parse_topology("1e1p1d")
    assert roles_for_newcomer(wanted, [PD]) == E
    assert roles_for_newcomer(wanted, [PD, E]) == P


def test_beyond_the_topology_its_ratio_is_kept() -> None:
    assert sorted(newcomers("2e1p1d", "2e1p1d", 4).split()) == ["d", "e", "e", "p"]
    assert sorted(newcomers("1e1p4d", "1e1p4d", 6).split()) == ["d"] * 4 + ["e", "p"]


GROUPS = st.lists(
    st.builds(WorkerGroup, st.integers(1, 6), st.frozensets(st.sampled_from(STAGES), min_size=1)),
    min_size=1,
    max_size=4,
).map(lambda groups: Topology((*groups, WorkerGroup(1, frozenset(STAGES)))))


@settings(max_examples=100, deadline=None)
@given(wanted=GROUPS, lost=st.sets(st.integers(0, 30), max_size=20))
def test_whoever_is_lost_newcomers_restore_the_topology(wanted: Topology, lost: set[int]) -> None:
    roles = [each.roles for each in wanted.workers()]
    fleet = [each for number, each in enumerate(roles) if number not in lost]
    while len(fleet) < wanted.num_workers:
        fleet.append(roles_for_newcomer(wanted, fleet))
    assert Counter(fleet) == Counter(roles)


@settings(max_examples=100, deadline=None)
@given(wanted=GROUPS, num=st.integers(1, 12))
def test_every_stage_is_served_as_early_as_can_be(wanted: Topology, num: int) -> None:
    """At least one stage more with each newcomer, until all are."""
    fleet: list[Roles] = []
    for _ in range(num):
        fleet.append(roles_for_newcomer(wanted, fleet))
        served = frozenset().union(*fleet)
        assert len(served) >= min(len(fleet), len(STAGES))


# Laying out


@pytest.mark.parametrize(
    ("topology", "needed", "layout"),
    [
        ("1e1p1d", (2.4, 0.3, 0.8), {E: 3, P: 1, D: 1}),
        ("1e1p1d", (0.0, 0.0, 0.0), {E: 1, P: 1, D: 1}),
        ("4e1p1d", (1.0, 1.1, 2.0), {E: 1, P: 2, D: 2}),
        ("1e1p1d", (9.0, 9.0, 9.0), {E: 4, P: 3, D: 3}),
    ],
)
def test_a_layout_is_the_least_that_serves_every_stage(
    topology: str, needed: tuple[float, ...], layout: dict[Roles, int]
) -> None:
    needs = dict(zip(STAGES, needed, strict=True))
    assert layout_for(needs, parse_topology(topology), 10) == layout


def test_merged_workers_divide_their_time() -> None:
    """Of a request's 1.6 s, encode takes 1 s: what each stage needs adds up."""
    traffic = cluster(roles_of("1epd"), rate=1.0)
    needs = {stage: each.demand for stage, each in traffic.stages.items()}
    assert sum(needs.values()) == pytest.approx(1.6)
    assert layout_for(needs, parse_topology("1epd"), 10) == {E | P | D: 2}


# Those that go


def going(workers: str, leaving: Sequence[str], **traffic: object) -> Switch | None:
    return replacement_for(cluster(roles_of(workers), **traffic).workers, leaving)  # type: ignore[arg-type]


def test_the_last_worker_of_a_stage_is_replaced() -> None:
    assert going("2e1p1d", ["d0"]) == Switch("e0", D)
    assert going("2e1p1d", ["e1"]) is None
    assert going("2e1p1d", ["e0", "d0"]) is None  # the last encoder cannot do both


def test_who_drains_soonest_replaces() -> None:
    workers = cluster(roles_of("2e2p1d")).workers
    quick = [
        replace(each, queued_s={"prefill": 0.1} if each.name == "p1" else each.queued_s) for each in workers
    ]
    assert replacement_for(quick, ["d0"]) == Switch("p1", D)


def test_who_is_switching_does_not_replace() -> None:
    assert going("2e1p1d", ["d0"], switching=["e0"]) == Switch("e1", D)


def test_who_prefills_and_drains_soonest_encodes_besides() -> None:
    workers = cluster(roles_of("1e2p1d"), switching=["p0"]).workers
    assert helper_for(workers) == Switch("p1", E | P)
    assert helper_for([each for each in workers if each.name == "d0"]) is None


def test_without_a_spare_worker_nobody_replaces() -> None:
    assert going("1e1p1d", ["d0"]) is None
