"""The policies of Serve's autoscaling, with Ray's own context and wrapper, and without a cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from epd.serve_app.ray.autoscaling import ADVISED, MAX_AGE_S, advice_stats, media_replicas, stage_replicas

NOW_S = 1000.0
STAGE = DeploymentID("Stage", "epd")
POLICIES = ("stage_replicas", "media_replicas")


def replica(number: int) -> ReplicaID:
    return ReplicaID(f"replica{number}", STAGE)


def context(
    advised: Mapping[int, Sequence[tuple[float, float]]],
    *,
    target: int = 3,
    running: int = 3,
    bounds: tuple[int, int] = (1, 8),
) -> AutoscalingContext:
    """advised: by replica, (age in seconds, number)."""
    series = {
        replica(number): [TimeStampedValue(NOW_S - age_s, num) for age_s, num in points]
        for number, points in advised.items()
    }
    return AutoscalingContext(
        deployment_id=STAGE, deployment_name="Stage", app_name="epd", current_num_replicas=running,
        target_num_replicas=target, running_replicas=[replica(number) for number in range(running)],
        total_num_requests=0.0, total_queued_requests=0.0, aggregated_metrics={},
        raw_metrics={ADVISED: series} if series else {}, capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1], policy_state={}, last_scale_up_time=None,
        last_scale_down_time=None, current_time=NOW_S, config=None,
    )  # fmt: skip


@pytest.mark.parametrize("policy", [stage_replicas, media_replicas])
def test_the_newest_advice_of_any_replica_counts(policy: object) -> None:
    assert policy(context({0: [(9.0, 2), (3.0, 4)], 1: [(8.0, 6), (2.0, 5)]})) == (5, {})  # type: ignore[operator]


def test_advice_keeps_the_bounds() -> None:
    assert stage_replicas(context({0: [(1.0, 40)]}, bounds=(2, 6)))[0] == 6
    assert stage_replicas(context({0: [(1.0, 0)]}, bounds=(2, 6)))[0] == 2


def test_without_advice_the_number_stays() -> None:
    """Serve's target, not the replicas that happen to run: one may be starting again."""
    assert stage_replicas(context({}, target=4, running=3))[0] == 4
    assert stage_replicas(context({0: []}, target=4))[0] == 4
    assert stage_replicas(context({0: [(1.0, float("nan"))]}, target=4))[0] == 4


def test_old_advice_is_none() -> None:
    assert stage_replicas(context({0: [(MAX_AGE_S + 1, 7)]}, target=4))[0] == 4
    assert stage_replicas(context({0: [(MAX_AGE_S - 1, 7)]}, target=4))[0] == 7


def test_a_replica_without_advice_records_nothing() -> None:
    assert advice_stats(None) == {}
    assert advice_stats(3) == {ADVISED: 3.0}


# In Serve's own state


def config(policy: str) -> AutoscalingConfig:
    """As in a YAML file."""
    return AutoscalingConfig(
        min_replicas=1, max_replicas=8, upscale_delay_s=0, downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=f"epd.serve_app.ray.autoscaling:{policy}"),
    )  # fmt: skip


def serve_state(policy: str, num_running: int) -> DeploymentAutoscalingState:
    state = DeploymentAutoscalingState(STAGE)
    info = DeploymentInfo(
        deployment_config=DeploymentConfig(autoscaling_config=config(policy)),
        replica_config=None,  # type: ignore[arg-type]
        start_time_ms=0,
        deployer_job_id="",
    )
    state.register(info, num_running)
    state.update_running_replica_ids([replica(number) for number in range(num_running)])
    return state


@pytest.mark.parametrize("policy", POLICIES)
def test_serve_follows_what_replicas_record(policy: str) -> None:
    """From the report of a replica to the number, through Serve 2.60's own code; at once, up and down."""
    state = serve_state(policy, 3)
    assert state.get_decision_num_replicas(3) == 3
    for age_s, advised, decided in ((2.0, 5, 5), (1.0, 2, 2), (0.0, 99, 8)):
        at_s = time.time() - age_s
        points = [TimeStampedValue(at_s, value) for value in advice_stats(advised).values()]
        state.record_request_metrics_for_replica(ReplicaMetricReport(replica(1), {ADVISED: points}, at_s))
        assert state.get_decision_num_replicas(3) == decided


@pytest.mark.parametrize("policy", POLICIES)
def test_the_controller_needs_nothing_of_ours(policy: str, tmp_path: Path) -> None:
    """Serve pickles the policy by value: it loads and runs where this project is not installed."""
    pickled = tmp_path / "policy"
    pickled.write_bytes(config(policy).policy.get_serialized_policy_def() or b"")
    code = (
        "import pickle, sys, types\n"
        f"policy = pickle.load(open({str(pickled)!r}, 'rb'))\n"
        "point = types.SimpleNamespace(timestamp=1.0, value=4.0)\n"
        "ctx = types.SimpleNamespace(raw_metrics={'advised': {'r': [point]}}, current_time=2.0,\n"
        "    target_num_replicas=1, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8)\n"
        "print(policy(ctx), [name for name in sys.modules if name.split('.')[0] in ('epd', 'serve_app')])"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "(4, {}) []"
