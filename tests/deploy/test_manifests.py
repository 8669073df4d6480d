"""docs/deploy: what KubeRay makes of the RayService, who reaches its pods, and that arguments exist."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from epd.serve_app.app_args import AppArgs
from tests import ROOT
from tests.deploy.kuberay import OPERATOR_LABELS, RAY_DRAIN_S, Group, Pod, admits, applies, groups, problems

DEPLOY = ROOT / "docs" / "deploy"
SERVICE, POLICY = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
CONFIG = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
HEAD, *WORKERS = groups(SERVICE)
ALL = (HEAD, *WORKERS)
CLUSTER = "epd-x7k2p"  # the operator makes up the last part, another one with each upgrade
OPERATOR_NAMESPACE = "default"
MARGIN_S = 10
API, DASHBOARD, GCS = 8000, 8265, 6379

Change = Callable[[Any], object]


def _cluster(service: Any) -> Any:
    return service["spec"]["rayClusterConfig"]


def _head(service: Any) -> Any:
    return _cluster(service)["headGroupSpec"]


def _container(service: Any) -> Any:
    return _head(service)["template"]["spec"]["containers"][0]


def _group(service: Any) -> Any:
    return _cluster(service)["workerGroupSpecs"][0]


def _worker_container(service: Any) -> Any:
    return _group(service)["template"]["spec"]["containers"][0]


def test_the_operator_can_bring_it_up() -> None:
    assert problems(SERVICE) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: _head(s)["rayStartParams"].update({"dashboard-host": "127.0.0.1"}), "on loopback"),
        (
            lambda s: _container(s).update(ports=[{"containerPort": 8000, "name": "serve"}]),
            "no port 'dashboard'",
        ),
        (
            lambda s: _container(s).update(ports=[{"containerPort": 8265, "name": "dashboard"}]),
            "no port 'serve'",
        ),
        (
            lambda s: _container(s).update(readinessProbe={"httpGet": {"path": "/health", "port": 8000}}),
            "only when the head is ready",
        ),
        (
            lambda s: _worker_container(s).update(
                readinessProbe={"httpGet": {"path": "/api/healthz", "port": 1}}
            ),
            "does not ask for a proxy",
        ),
        (lambda s: _container(s).update(readynessProbe={}), "'readynessProbe' was unexpected"),
        (lambda s: s["spec"].update(drainSeconds=5), "'drainSeconds' was unexpected"),
        (lambda s: _group(s).pop("minReplicas"), "'minReplicas' is a required property"),
        (
            lambda s: _group(s).update(replicas="2"),
            "workerGroupSpecs[0].replicas: '2' is not of type 'integer'",
        ),
        (lambda s: _group(s)["rayStartParams"].update({"num-cpus": 8}), "8 is not of type 'string'"),
        (lambda s: _container(s)["resources"]["limits"].update(memory="8 GB"), "'8 GB' does not match"),
        (lambda s: _cluster(s).update(authOptions={"mode": "tokens"}), "'tokens' is not one of"),
        (lambda s: _cluster(s).pop("rayVersion"), "which Ray of no version lacks"),
        (lambda s: _group(s).update(maxReplicas=1), "minReplicas 2, replicas 2 and maxReplicas 1"),
        (lambda s: _container(s).update(volumeMounts=[{"name": "other", "mountPath": "/x"}]), "no volume"),
    ],
)
def test_the_rules_find_what_is_wrong(change: Change, words: str) -> None:
    service = copy.deepcopy(SERVICE)
    change(service)
    assert any(words in text for text in problems(service))


def test_without_ports_the_operator_adds_its_own() -> None:
    service = copy.deepcopy(SERVICE)
    del _container(service)["ports"]
    assert {"dashboard", "serve"} <= set(groups(service)[0].ports)
    assert problems(service) == []


@pytest.mark.parametrize("group", ALL, ids=lambda group: group.name)
def test_pods_outlive_their_answers(group: Group) -> None:
    drain_s = CONFIG["applications"][0]["args"]["drain_s"]
    command = group.container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert drain_s <= int(command[1]) <= group.grace_s - RAY_DRAIN_S - MARGIN_S
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] >= drain_s + MARGIN_S


@pytest.mark.parametrize("group", ALL, ids=lambda group: group.name)
def test_pods_have_probes(group: Group) -> None:
    for name in ("livenessProbe", "readinessProbe"):
        assert group.container[name]["httpGet"]["path"].startswith("/")


def test_the_proxy_listens_where_the_operator_and_clients_ask() -> None:
    assert CONFIG["http_options"] == {"host": "0.0.0.0", "port": HEAD.ports["serve"]}


def test_ray_asks_for_a_token() -> None:
    assert SERVICE["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}


# Who reaches what


@pytest.mark.parametrize("group", ALL, ids=lambda group: group.name)
def test_the_policy_is_for_all_pods_of_every_cluster_of_the_service(group: Group) -> None:
    assert applies(POLICY, group.labels(CLUSTER))
    assert applies(POLICY, group.labels("epd-after-an-upgrade"))


def test_pods_of_the_cluster_reach_each_other_at_every_port() -> None:
    for group in ALL:
        assert all(admits(POLICY, Pod(group.labels(CLUSTER)), port) for port in (GCS, DASHBOARD, API, 43210))


def test_the_operator_reaches_the_dashboard_and_the_proxy() -> None:
    operator = Pod(OPERATOR_LABELS, OPERATOR_NAMESPACE)
    assert admits(POLICY, operator, DASHBOARD)
    assert admits(POLICY, operator, API)
    assert not admits(POLICY, operator, GCS)


def _strangers() -> dict[str, Pod]:
    ours, theirs = HEAD.labels(CLUSTER), Group("theirs", False, {"template": {}}).labels("other")
    return {
        "another cluster of this namespace": Pod(theirs),
        "another cluster elsewhere": Pod(theirs, "tenant"),
        "our labels elsewhere": Pod(ours, "tenant"),
        "the operator's labels elsewhere": Pod(OPERATOR_LABELS, "tenant"),
        "any pod": Pod({}),
    }


@pytest.mark.parametrize("stranger", _strangers().values(), ids=_strangers())
def test_strangers_reach_the_api_alone(stranger: Pod) -> None:
    assert admits(POLICY, stranger, API)
    assert [port for port in (GCS, DASHBOARD, 10001, 52365, 43210) if admits(POLICY, stranger, port)] == []


# Arguments of the application


@pytest.mark.parametrize("name", ["kuberay.yaml", "serve_config.yaml"])
def test_arguments_are_those_of_the_application(name: str) -> None:
    config = CONFIG if name == "kuberay.yaml" else yaml.safe_load((DEPLOY / name).read_text())
    (application,) = config["applications"]
    assert application["import_path"] == "epd.serve_app.app:build_app"
    AppArgs(**application["args"]).resolved()
