"""Topology strings: what they stand for, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import RequestError
from epd.topology import STAGES, Stage, Topology, WorkerGroup, parse_topology

E, P, D = STAGES


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("1e1p1d", [("e0", {E}), ("p0", {P}), ("d0", {D})]),
        ("2e1p1d", [("e0", {E}), ("e1", {E}), ("p0", {P}), ("d0", {D})]),
        ("1epd", [("epd0", {E, P, D})]),
        ("1ep1d", [("ep0", {E, P}), ("d0", {D})]),
        ("1e1pd", [("e0", {E}), ("pd0", {P, D})]),
        ("1e1epd1e", [("e0", {E}), ("epd0", {E, P, D}), ("e1", {E})]),
        ("1dpe", [("epd0", {E, P, D})]),
    ],
)
def test_a_text_stands_for_workers(text: str, workers: list[tuple[str, set[Stage]]]) -> None:
    assert [(worker.name, set(worker.roles)) for worker in parse_topology(text).workers()] == workers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "received the topology ''"),
        ("epd", "numbers of workers"),
        ("1e1p1d ", "'1e1p1d '"),
        ("1e 1p1d", "numbers of workers"),
        ("1e1p1x", "numbers of workers"),
        ("-1e1p1d", "numbers of workers"),
        ("1e1p", "no worker does decode"),
        ("2e", "no worker does decode or prefill"),
        ("0e1epd", "'0e'"),
        ("1eepd", "each role once"),
        ("300e1p1d", "302 workers; allowed are 256"),
        ("9999999999e1p1d", "'9999999999e'"),
    ],
)
def test_what_is_no_topology_is_told_with_what_is(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=r"^received ") as caught:
        parse_topology(text)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


ROLES = st.frozensets(st.sampled_from(STAGES), min_size=1)
GROUPS = st.lists(st.builds(WorkerGroup, st.integers(1, 9), ROLES), min_size=1, max_size=5)


@given(GROUPS)
def test_a_topology_is_read_back_from_its_text(groups: list[WorkerGroup]) -> None:
    topology = Topology((*groups, WorkerGroup(1, frozenset(STAGES))))
    assert parse_topology(str(topology)) == topology
    names = [worker.name for worker in topology.workers()]
    assert len(set(names)) == topology.num_workers


@pytest.mark.parametrize(("text", "num"), [("1epd", 1), ("1e1p1d", 3), ("2e1p1d", 4), ("1ep2d", 3)])
def test_a_topology_means_a_replica_for_each_worker(text: str, num: int) -> None:
    assert parse_topology(text).num_workers == num


def test_replicas_are_bounded_as_workers_are() -> None:
    with pytest.raises(RequestError, match="3 workers; allowed are 2"):
        parse_topology("1e1p1d", max_workers=2)
