"""Elasticity as policy, without I/O: load is estimated, roles are switched and replicas wanted by it.

samples of workers -> LoadEstimator -> ClusterLoad -> RoleController -> Switch
                                                   -> ReplicaAdviser -> workers of each role
"""

from epd.control.elasticity.controller import ControllerConfig, Decision, RoleController, Switch
from epd.control.elasticity.estimator import EstimatorConfig, LoadEstimator
from epd.control.elasticity.load import (
    ClusterLoad,
    RequestWork,
    Roles,
    StageLoad,
    StageNeed,
    StageSample,
    WorkerSample,
    WorkerStanding,
)
from epd.control.elasticity.replicas import ReplicaAdviser, ReplicaConfig

__all__ = [
    "ClusterLoad",
    "ControllerConfig",
    "Decision",
    "EstimatorConfig",
    "LoadEstimator",
    "ReplicaAdviser",
    "ReplicaConfig",
    "RequestWork",
    "RoleController",
    "Roles",
    "StageLoad",
    "StageNeed",
    "StageSample",
    "Switch",
    "WorkerSample",
    "WorkerStanding",
]
