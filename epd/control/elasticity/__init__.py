"""Follows traffic with roles and replica counts: pure policy, driven by the server and by the simulator.

samples of workers -> TrafficEstimator -> ClusterTraffic -> RoleController -> Switch
                                                   -> StageReplicas  -> ReplicaAdvice
"""

from epd.control.elasticity.assignment import helper_for, replacement_for, roles_for_newcomer
from epd.control.elasticity.cluster import (
    ClusterTraffic,
    MediaSample,
    Roles,
    StageNeed,
    StageSample,
    StageTraffic,
    WorkerSample,
    WorkerStanding,
)
from epd.control.elasticity.controller import ControllerConfig, Decision, RoleController, Switch
from epd.control.elasticity.estimator import TrafficEstimator
from epd.control.elasticity.replicas import MediaReplicas, ReplicaAdvice, ReplicaConfig, StageReplicas

__all__ = [
    "ClusterTraffic",
    "ControllerConfig",
    "Decision",
    "MediaReplicas",
    "MediaSample",
    "ReplicaAdvice",
    "ReplicaConfig",
    "RoleController",
    "Roles",
    "StageNeed",
    "StageReplicas",
    "StageSample",
    "StageTraffic",
    "Switch",
    "TrafficEstimator",
    "WorkerSample",
    "WorkerStanding",
    "helper_for",
    "replacement_for",
    "roles_for_newcomer",
]
