"""Switches roles as traffic changes: pure policy, driven by the server and by the simulator.

samples of workers -> LoadEstimator -> ClusterLoad -> RoleController -> Switch
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

__all__ = [
    "ClusterLoad",
    "ControllerConfig",
    "Decision",
    "EstimatorConfig",
    "LoadEstimator",
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
