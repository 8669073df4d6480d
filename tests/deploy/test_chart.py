"""docs/deploy/chart: drawn values give objects that Kubernetes and KubeRay take, and workers find pods.

Helm 4.2.3 has rendered the same 200 draws, with equal objects; no package has a program of it for tests.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import yaml

import epd
from epd.serve_app.app_args import AppArgs
from epd.topology import parse_topology
from tests.deploy.chart import CHART, DEFAULTS, MANIFEST, manifest, merged, objects, refusals
from tests.deploy.drawn_values import TOPOLOGIES, drawn
from tests.deploy.kuberay import Pod, admits, groups, problems, unplaced
from tests.deploy.schema import ALL_ON, violations

NUM_DRAWN = 200


def by_kind(values: dict[str, Any]) -> dict[str, Any]:
    return {each["kind"]: each for each in objects(values)}


def deployments(service: Any) -> list[Any]:
    (application,) = yaml.load(service["spec"]["serveConfigV2"], yaml.CSafeLoader)["applications"]
    found: list[Any] = application["deployments"]
    return found


def at_most(service: Any) -> tuple[Any, list[Any]]:
    """The same when all numbers have grown, and replicas of an update stand beside the old."""
    grown, more = copy.deepcopy(service), []
    for group in grown["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        group["replicas"] = group["maxReplicas"]
    for each in deployments(service):
        num = each.get("num_replicas") or each["autoscaling_config"]["max_replicas"]
        surge = math.ceil(each["max_surge_percent"] / 100 * num)
        more.append({**each, "num_replicas": num + surge})
    return grown, more


def at_first(service: Any) -> list[Any]:
    """The deployments with the numbers that they begin with."""
    return [
        {**each, "num_replicas": each.get("num_replicas") or each["autoscaling_config"]["min_replicas"]}
        for each in deployments(service)
    ]


def test_drawn_values_are_valid_and_every_worker_finds_a_pod() -> None:
    seen = set()
    for seed in range(NUM_DRAWN):
        values = drawn(seed)
        assert refusals(values) == [], values
        found = objects(values)
        for each in found:
            assert (violations(each), values) == ([], values)
        service = next(each for each in found if each["kind"] == "RayService")
        assert (problems(service), values) == ([], values)
        assert (unplaced(service, at_first(service)), values) == ([], values)
        grown, more = at_most(service)
        assert (unplaced(grown, more), values) == ([], values)
        assert (unplaced(grown, more[::-1]), values) == ([], values)
        seen |= {each["kind"] for each in found}
    assert seen == {"RayService", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "ConfigMap"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("grows", [False, True])
def test_a_topology_gets_its_workers_and_serve_its_arguments(topology: str, grows: bool) -> None:
    values = {"args": {"topology": topology}, "autoscaling": {"enabled": grows}}
    service = by_kind(values)["RayService"]
    stage = at_first(service)[-1]
    assert stage["num_replicas"] == parse_topology(topology).num_workers
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert AppArgs(**application["args"]).resolved().elastic == grows
    assert service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] == grows


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fronts": {"replicas": 9}}, "$.fronts.replicas: 9 is greater than the maximum of 4"),
        ({"fronts": {"replicas": 0}}, "0 is less than the minimum of 1"),
        ({"stages": {"gpus": 0.4}}, "0.4 is not one of [0, 0.25, 0.33, 0.5, 1, 2, 4, 8]"),
        ({"args": {"topology": "2e2p"}}, "$.args.topology: '2e2p' does not match 'd'"),
        ({"args": {"topology": "0e1pd"}}, "'0e1pd' does not match"),
        ({"args": {"max_requests": 9000}}, "9000 is greater than the maximum of 4224"),
        ({"args": {"drain_s": "60"}}, "$.args.drain_s: '60' is not of type 'integer'"),
        ({"media": {"memory": "8 GB"}}, "'8 GB' does not match"),
        ({"frnts": {}}, "('frnts' was unexpected)"),
        ({"podMonitor": {"intervall": "1m"}}, "('intervall' was unexpected)"),
        ({"image": ""}, "$.image"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], words: str) -> None:
    (refusal,) = refusals(values)
    assert words in refusal


def test_a_wrong_chart_would_be_seen() -> None:
    """A stage pod with a GPU too few, and fields that no schema knows."""
    service = by_kind({})["RayService"]
    limits = groups(service)[1].container["resources"]["limits"]
    limits["nvidia.com/gpu"] = 2  # type: ignore[index]
    assert unplaced(service, at_first(service)) == ["2 of 6 replicas of Stage find no pod with (2, 1)"]
    for found in objects(ALL_ON):
        assert violations({**found, "sepc": {}}) != []


def test_the_manifest_is_the_chart_without_a_value() -> None:
    assert MANIFEST.read_text(encoding="utf-8") == manifest(), "run python -m tests.deploy.chart"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == epd.__version__
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(DEFAULTS) == set(schema["properties"]) - {"global"}


def test_prometheus_finds_the_head_and_may_ask_it() -> None:
    found = by_kind(ALL_ON)
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    head, *workers = groups(found["RayService"])
    labels = found["PodMonitor"]["spec"]["selector"]["matchLabels"]
    assert labels.items() <= head.labels("epd-1").items()
    assert not any(labels.items() <= each.labels("epd-1").items() for each in workers)
    assert admits(found["NetworkPolicy"], Pod({}, "monitoring"), head.ports[endpoint["port"]])
    budget = found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert budget == labels


def test_the_dashboard_is_the_file() -> None:
    held = json.loads(by_kind(ALL_ON)["ConfigMap"]["data"]["epd.json"])
    assert held == json.loads((CHART.parent / "grafana" / "epd.json").read_text())


def test_releases_do_not_share_names() -> None:
    one, other = (
        {(each["kind"], each["metadata"]["name"]) for each in objects(ALL_ON, name)} for name in "ab"
    )
    assert one & other == set()
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
