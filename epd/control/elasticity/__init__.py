"""Follows traffic with roles and replica counts: pure policy, driven by the server and by the simulator.

samples of workers -> LoadEstimator -> ClusterLoad -> RoleController -> Switch
                                                   -> StageReplicas  -> ReplicaAdvice
"""

from epd.control.elasticity.assignment import replacement_for, roles_for_newcomer
from epd.control.elasticity.controller import ControllerConfig, Decision, RoleController, Switch
from epd.control.elasticity.estimator import EstimatorConfig, LoadEstimator
from epd.control.elasticity.fleet_traffic import OtherFronts, TrafficTotals
from epd.control.elasticity.load import (
    ClusterLoad,
    MediaSample,
    RequestWork,
    Roles,
    StageLoad,
    StageNeed,
    StageSample,
    WorkerSample,
    WorkerStanding,
)
from epd.control.elasticity.replicas import MediaReplicas, ReplicaAdvice, ReplicaConfig, StageReplicas

__all__ = [
    "ClusterLoad",
    "ControllerConfig",
    "Decision",
    "EstimatorConfig",
    "LoadEstimator",
    "MediaReplicas",
    "MediaSample",
    "OtherFronts",
    "ReplicaAdvice",
    "ReplicaConfig",
    "RequestWork",
    "RoleController",
    "Roles",
    "StageLoad",
    "StageNeed",
    "StageReplicas",
    "StageSample",
    "Switch",
    "TrafficTotals",
    "WorkerSample",
    "WorkerStanding",
    "replacement_for",
    "roles_for_newcomer",
]
