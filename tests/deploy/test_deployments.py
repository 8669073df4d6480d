"""Deployments in docs/deploy: they exist, Serve takes their fields, and KubeRay's pods have room for them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from epd.serve_app.app_args import AppArgs
from epd.topology import parse_topology
from tests import ROOT
from tests.deploy.kuberay import groups, unplaced

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own, when it is imported
    from ray.serve._private.build_app import build_app as built
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import DeploymentSchema, ServeDeploySchema

    from epd.serve_app.app import build_app
    from epd.serve_app.ray.gpus import are_fitting

DEPLOY = ROOT / "docs" / "deploy"
SERVICE, _ = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
CONFIGS: Mapping[str, Any] = {
    "kuberay.yaml": yaml.safe_load(SERVICE["spec"]["serveConfigV2"]),
    **{
        name: yaml.safe_load((DEPLOY / name).read_text())
        for name in ("serve_config.yaml", "autoscaling.yaml", "gpu.yaml")
    },
}
SHUTDOWN_MARGIN_S = 10


def application(name: str) -> Any:
    (found,) = CONFIGS[name]["applications"]
    return found


def deployments(name: str) -> dict[str, Any]:
    return {each["name"]: each for each in application(name)["deployments"]}


@pytest.mark.parametrize("name", CONFIGS)
def test_serve_takes_the_file(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of metrics_interval_s, whose successor is not read
        ServeDeploySchema.model_validate(CONFIGS[name])
    fields = set(DeploymentSchema.model_fields)  # Serve ignores others without a word
    assert [set(each) - fields for each in deployments(name).values() if set(each) - fields] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_it_names_the_deployments_of_the_application(name: str) -> None:
    found = built(build_app(AppArgs(**application(name)["args"])), name="epd")
    assert {each.name for each in found.deployments} == set(deployments(name)) == {"Front", "Media", "Stage"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_worker_of_the_topology_has_a_replica(name: str) -> None:
    stage = deployments(name)["Stage"]
    start = stage.get("num_replicas") or stage["autoscaling_config"]["initial_replicas"]
    assert start == parse_topology(application(name)["args"]["topology"]).num_workers


@pytest.mark.parametrize("name", CONFIGS)
def test_replicas_may_complete_their_answers(name: str) -> None:
    drain_s = application(name)["args"]["drain_s"]
    for each in deployments(name).values():
        assert each["graceful_shutdown_timeout_s"] >= drain_s + SHUTDOWN_MARGIN_S


@pytest.mark.parametrize("name", ["kuberay.yaml", "serve_config.yaml"])
def test_serve_passes_on_more_than_is_answered(name: str) -> None:
    """Otherwise clients would wait in the proxy, where nobody refuses them, and health with them."""
    limit = application(name)["args"]["max_requests"]
    assert deployments(name)["Front"]["max_ongoing_requests"] >= 2 * limit


# Autoscaling


@pytest.mark.parametrize("deployment", ["Media", "Stage"])
def test_numbers_follow_the_advice_of_the_deployment(deployment: str) -> None:
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):
        config = AutoscalingConfig(**deployments("autoscaling.yaml")[deployment]["autoscaling_config"])
    assert config.policy.policy_function == f"epd.serve_app.ray.autoscaling:{deployment.lower()}_replicas"
    assert config.policy.get_policy().__name__ == f"{deployment.lower()}_replicas"
    assert config.upscale_delay_s == config.downscale_delay_s == 0
    assert config.look_back_period_s > config.metrics_interval_s


def test_stage_workers_never_fall_below_one_of_each_set_of_roles() -> None:
    topology = parse_topology(application("autoscaling.yaml")["args"]["topology"])
    config = deployments("autoscaling.yaml")["Stage"]["autoscaling_config"]
    assert config["min_replicas"] == len({group.roles for group in topology.groups})
    assert application("autoscaling.yaml")["args"]["elastic"]


# Room in KubeRay's pods


def test_every_replica_finds_a_pod() -> None:
    assert unplaced(SERVICE, deployments("kuberay.yaml").values()) == []


def test_an_update_finds_room_for_the_replicas_beside_the_old() -> None:
    """Otherwise Serve waits for room for ever; without room the old replica has to end first."""
    more = []
    for each in deployments("kuberay.yaml").values():
        surge = math.ceil(each["max_surge_percent"] / 100 * each["num_replicas"])
        more.append({**each, "num_replicas": each["num_replicas"] + surge})
    assert unplaced(SERVICE, more) == []
    assert any(each["max_surge_percent"] > 0 for each in more)


def _workers(service: Any, group: int) -> Any:
    return service["spec"]["rayClusterConfig"]["workerGroupSpecs"][group]


def _limits(service: Any, group: int) -> Any:
    return _workers(service, group)["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: _limits(s, 0).pop("nvidia.com/gpu"), "6 of 6 replicas of Stage"),
        (lambda s: _workers(s, 0).update(replicas=1), "3 of 6 replicas of Stage"),
        (lambda s: _workers(s, 0).update(rayStartParams={"num-cpus": "0"}), "6 of 6 replicas of Stage"),
    ],
)
def test_replicas_without_room_are_found(change: Callable[[Any], object], words: str) -> None:
    service = copy.deepcopy(SERVICE)
    change(service)
    assert any(words in text for text in unplaced(service, deployments("kuberay.yaml").values()))


def test_workers_that_share_a_gpu_fit_it() -> None:
    (stage,) = [each for name, each in deployments("gpu.yaml").items() if name == "Stage"]
    assert are_fitting([stage["ray_actor_options"]["num_gpus"]] * stage["num_replicas"], [1])
    assert stage["max_surge_percent"] == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_only_stage_workers_ask_for_gpus(name: str) -> None:
    asking = {
        each["name"] for each in deployments(name).values() if each["ray_actor_options"].get("num_gpus")
    }
    assert asking <= {"Stage"}
    assert bool(asking) == (name in ("kuberay.yaml", "gpu.yaml"))


def test_pods_with_a_gpu_go_to_nodes_that_have_one() -> None:
    for group in groups(SERVICE):
        has_gpu = group.num_gpus > 0
        assert ("nodeSelector" in group.pod) == has_gpu
        assert ("nvidia.com/gpu" in {each["key"] for each in group.pod.get("tolerations", ())}) == has_gpu
