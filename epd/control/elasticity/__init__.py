"""Follows traffic with roles and replica counts: pure policy, driven by the server and by the simulator.

samples of workers -> TrafficEstimator -> ClusterTraffic -> RoleController -> Switch
                                                   -> StageReplicas  -> ReplicaAdvice
"""
