"""Advice about replicas: for what Serve scales, from the load, and shown with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from epd.control.elasticity.cluster import (
    ClusterTraffic,
    MediaSample,
    StageNeed,
    StageTraffic,
    WorkerStanding,
)
from epd.control.elasticity.replicas import ReplicaAdvice, ReplicaConfig
from epd.serve_app.orchestration.elastic import ReplicaAdvisor
from epd.topology import STAGES, Stage

QUICK = ReplicaConfig(up_delay_s=0.0, down_delay_s=0.0)
ROLES: tuple[Stage, ...] = ("encode", "prefill", "decode")


def load(now_s: float, demand: float, *, is_known: bool = True) -> ClusterTraffic:
    """Three workers. demand: encoders that arrivals take."""
    stages = {
        stage: StageTraffic(
            stage, StageNeed(1.0, part_s=1.0), 1, 0, 0, 0.5, demand if stage == "encode" else 0.1, 0.0, 0.0
        )
        for stage in STAGES
    }
    workers = tuple(WorkerStanding(f"{role[0]}0", frozenset({role}), 0.0, {}, 0) for role in ROLES)
    return ClusterTraffic(now_s, 1.0, 0.0, 20.0, 0, stages, workers, is_known)


def advisor(bounds: Mapping[str, tuple[int, int]], settle_s: float = 0.0) -> ReplicaAdvisor:
    made = ReplicaAdvisor(QUICK, settle_s)
    made.follow(bounds, "1e1p1d")
    return made


def test_only_what_serve_scales_is_advised() -> None:
    assert not advisor({}).is_wanted
    stage = advisor({"Stage": (3, 8)})
    stage.look(load(0.0, 2.0), [MediaSample("v0", 2, 0, 0)])
    assert {name: each.num_replicas for name, each in stage.advice.items()} == {"Stage": 5}
    assert "encode 2.4" in stage.advice["Stage"].reason
    stage.follow({}, "1e1p1d")
    assert not stage.is_wanted


def test_media_are_advised_by_their_tasks() -> None:
    media = advisor({"Media": (1, 4)})
    for second in range(60):
        media.look(load(second, 0.1), [MediaSample("v0", 2, 4, second)])
    assert media.advice["Media"].num_replicas == 2


def test_serve_s_bounds_may_change() -> None:
    stage = advisor({"Stage": (3, 4)})
    stage.look(load(0.0, 5.0), [])
    assert stage.advice["Stage"].num_replicas == 4
    assert stage.advice["Stage"].verdict == "up"
    stage.follow({"Stage": (3, 6)}, "1e1p1d")
    stage.look(load(1.0, 5.0), [])
    assert stage.advice["Stage"].num_replicas == 6


def test_nothing_is_advised_before_workers_and_load_are_known() -> None:
    """A front that has just begun to lead may not have met all workers: their number is no advice."""
    stage = advisor({"Stage": (1, 8)}, settle_s=10.0)
    stage.look(load(0.0, 2.0), [])
    stage.look(load(9.0, 2.0), [])
    assert stage.advice == {}
    stage.look(load(10.0, 2.0, is_known=False), [])
    assert stage.advice == {}
    stage.look(load(11.0, 2.0), [])
    assert stage.advice["Stage"].num_replicas == 5


def test_figures_alone_are_given_out_now_and_then() -> None:
    stage = advisor({"Stage": (3, 8)})
    given = set()
    for second in range(13):
        stage.look(load(second, 1.5 + second / 1000), [])
        given.add(stage.advice["Stage"].at_s)
    assert given == {0.0, 1.0, 6.0, 11.0}  # up, enough, and the same again


def test_who_does_not_lead_shows_the_leader_s() -> None:
    stage = advisor({"Stage": (3, 8)}, settle_s=5.0)
    stage.look(load(0.0, 2.0), [])
    others = {"Stage": ReplicaAdvice(1.0, "enough", 7, "as the leader says")}
    stage.stop(others)
    assert stage.advice == others
    stage.look(load(6.0, 2.0), [])
    assert stage.advice == others  # it settles again
