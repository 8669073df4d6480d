"""What KubeRay's operator makes of a RayService, and whom a NetworkPolicy lets in: their rules, not ours.

Read in KubeRay 1.7.0, ray-operator/controllers/ray: common/service.go (ports), common/pod.go (labels, start
parameters, probes), utils/util.go (the dashboard's address), utils/validation.go (what it refuses),
rayservice_controller.go (when the application is deployed, which pods get clients). Its CRD is in schema.py.
Only what our manifest needs is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.deploy.schema import violations

Object = Mapping[str, Any]
Labels = Mapping[str, str]

DEFAULT_PORTS = {"client": 10001, "gcs-server": 6379, "dashboard": 8265, "metrics": 8080, "serve": 8000}
DEFAULT_GRACE_S = 30
# Ray's own, seen in 2.60: what `ray start` gives its node to be emptied, upon SIGTERM.
RAY_DRAIN_S = 30
AGENT_PORT = 52365
_LEAST_RAY_WITH_TOKENS = (2, 52)
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
# Labels of the pods of the operator that Helm's chart installs.
OPERATOR_LABELS = {
    "app.kubernetes.io/name": "kuberay-operator",
    "app.kubernetes.io/instance": "kuberay-operator",
    "app.kubernetes.io/component": "kuberay-operator",
}


@dataclass(frozen=True, slots=True)
class Group:
    """The head, or a group of workers. spec: as it stands in the manifest."""

    name: str
    is_head: bool
    spec: Object

    @property
    def pod(self) -> Object:
        pod: Object = self.spec["template"]["spec"]
        return pod

    @property
    def container(self) -> Object:
        """Ray's own: the first."""
        container: Object = self.pod["containers"][0]
        return container

    @property
    def start_params(self) -> Labels:
        given: Labels = self.spec.get("rayStartParams", {})
        return {"dashboard-host": "0.0.0.0", **given} if self.is_head else given

    @property
    def ports(self) -> Labels:
        """Of the head's service: those of the container, or all defaults if it has none; metrics always."""
        given = {
            port.get("name") or f"{port['containerPort']}-port": port["containerPort"]
            for port in self.container.get("ports", ())
        }
        return {"metrics": DEFAULT_PORTS["metrics"], **(given or DEFAULT_PORTS)}

    def labels(self, cluster: str) -> Labels:
        """Of its pods in a cluster of this name. Those given win over the operator's, but for three."""
        fixed = {
            "ray.io/cluster": cluster,
            "ray.io/node-type": "head" if self.is_head else "worker",
            "ray.io/group": "headgroup" if self.is_head else self.name,
        }
        operators = {
            "ray.io/is-ray-node": "yes",
            "app.kubernetes.io/name": "kuberay",
            "app.kubernetes.io/created-by": "kuberay-operator",
        }
        given = self.spec["template"].get("metadata", {}).get("labels", {})
        return {**operators, **given, **self.spec.get("labels", {}), **fixed}

    @property
    def readiness(self) -> Object:
        """The probe that the operator leaves as it is, or the kind of question that it asks itself."""
        given: Object | None = self.container.get("readinessProbe")
        if given is not None:
            return given
        agent = {"httpGet": {"path": "/api/healthz", "port": AGENT_PORT}}
        return agent if self.is_head else {"httpGet": {"path": "/-/healthz", "port": 8000}}

    @property
    def num_pods(self) -> int:
        return 1 if self.is_head else int(self.spec["replicas"])

    @property
    def num_cpus(self) -> int:
        """Those of a pod, as Ray is started with: of rayStartParams, else of limits, else of requests."""
        resources = self.container.get("resources", {})
        by_kind = (resources.get(kind, {}).get("cpu") for kind in ("limits", "requests"))
        given = (self.start_params.get("num-cpus"), *by_kind)
        return int(next((each for each in given if each is not None), 0))

    @property
    def num_gpus(self) -> int:
        """Those of a pod: of rayStartParams, else of the limit whose name ends with "gpu"."""
        limits = self.container.get("resources", {}).get("limits", {})
        given = self.start_params.get("num-gpus")
        return int(given or sum(int(num) for name, num in limits.items() if name.endswith("gpu")))

    @property
    def grace_s(self) -> int:
        return int(self.pod.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))


def groups(service: Object) -> list[Group]:
    """Of a RayService, the head first."""
    cluster = service["spec"]["rayClusterConfig"]
    workers = [Group(spec["groupName"], False, spec) for spec in cluster.get("workerGroupSpecs", ())]
    return [Group("headgroup", True, cluster["headGroupSpec"]), *workers]


def problems(service: Object) -> list[str]:
    """Why the operator cannot bring the application up, or sends clients where nobody answers."""
    wrong = violations(service)
    return wrong or [*_refusals(service), *_pod_problems(service), *_head_problems(service)]


def unplaced(service: Object, deployments: Iterable[Object]) -> list[str]:
    """Which replicas of Serve's deployments find no pod with free CPUs and GPUs.

    Those that ask for GPUs choose first; the others take pods without one first, as Ray's scheduler does.
    """
    pods = [
        _Room(each.num_cpus, [1.0] * each.num_gpus) for each in groups(service) for _ in range(each.num_pods)
    ]
    found = []
    for deployment in sorted(deployments, key=lambda each: -each["ray_actor_options"].get("num_gpus", 0)):
        num, options = deployment["num_replicas"], deployment["ray_actor_options"]
        wanted = (options.get("num_cpus", 1), options.get("num_gpus", 0))
        left = sum(not _place(pods, wanted) for _ in range(num))
        if left:
            found.append(f"{left} of {num} replicas of {deployment['name']} find no pod with {wanted}")
    return found


@dataclass(slots=True)
class _Room:
    """What is free of a pod. gpus: the share of each."""

    cpus: float
    gpus: list[float]

    def take(self, cpus: float, gpus: float) -> bool:
        """Takes whole GPUs, or a share of one. Returns whether there is room."""
        share, num = (gpus, 1) if 0 < gpus < 1 else (1.0, int(gpus))
        chosen = [number for number, free in enumerate(self.gpus) if free >= share - 1e-6][:num]
        if self.cpus < cpus or len(chosen) < num:
            return False
        self.cpus -= cpus
        for number in chosen:
            self.gpus[number] -= share
        return True


def _place(pods: list[_Room], wanted: tuple[float, float]) -> bool:
    """Takes CPUs and GPUs of the first pod that has them. Returns whether there is one."""
    return any(pod.take(*wanted) for pod in sorted(pods, key=lambda each: len(each.gpus)))


def _refusals(service: Object) -> Iterator[str]:
    """As `ValidateRayServiceSpec`, of which no cluster comes."""
    cluster = service["spec"]["rayClusterConfig"]
    for group in cluster.get("workerGroupSpecs", ()):
        name, least, most = group["groupName"], group["minReplicas"], group["maxReplicas"]
        if not 0 <= least <= group["replicas"] <= most:
            yield f"{name}: minReplicas {least}, replicas {group['replicas']} and maxReplicas {most}"
    if cluster.get("authOptions", {}).get("mode") == "token":
        version = tuple(int(part) for part in cluster.get("rayVersion", "0.0").split(".")[:2])
        if version < _LEAST_RAY_WITH_TOKENS:
            yield f"authOptions.mode is token, which Ray {cluster.get('rayVersion', 'of no version')} lacks"


def _pod_problems(service: Object) -> Iterator[str]:
    for group in groups(service):
        mounted = {mount["name"] for mount in group.container.get("volumeMounts", ())}
        if missing := mounted - {volume["name"] for volume in group.pod.get("volumes", ())}:
            yield f"{group.name}: no volume {missing}"


def _head_problems(service: Object) -> Iterator[str]:
    head, *workers = groups(service)
    if "dashboard" not in head.ports:
        yield "the head's service has no port 'dashboard': the operator finds no address to deploy to"
    if head.start_params["dashboard-host"] in _LOOPBACK:
        yield "the dashboard listens on loopback: the operator cannot reach it"
    if not any(name == "serve" or name.startswith("serve-") for name in head.ports):
        yield "the head has no port 'serve': there is no service for clients"
    if _asks_application(head.readiness, head.ports):
        yield "the head is ready only with the application, which is deployed only when the head is ready"
    yield from (
        f"{worker.name}: clients are sent to every ready worker, and readiness does not ask for a proxy"
        for worker in workers
        if not _asks_application(worker.readiness, worker.ports)
    )


def _asks_application(probe: Object, ports: Mapping[str, Any]) -> bool:
    """Whether a probe depends on Serve's port."""
    serve = ports.get("serve", DEFAULT_PORTS["serve"])
    asked = {probe.get(kind, {}).get("port") for kind in ("httpGet", "tcpSocket")}
    command = " ".join(probe.get("exec", {}).get("command", ()))
    return bool(asked & {"serve", serve}) or f":{serve}/" in command


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that asks, by its labels and the namespace that it is in."""

    labels: Labels
    namespace: str = "apps"

    @property
    def namespace_labels(self) -> Labels:
        """Kubernetes itself gives every namespace this one."""
        return {"kubernetes.io/metadata.name": self.namespace}


def applies(policy: Object, labels: Labels) -> bool:
    return _selects(policy["spec"]["podSelector"], labels)


def admits(policy: Object, client: Pod, port: int, namespace: str = "apps") -> bool:
    """Whether a policy of this namespace lets a pod in at a port of the pods that it applies to."""
    return any(
        _has_port(rule, port) and _is_from(rule, client, namespace)
        for rule in policy["spec"].get("ingress", ())
    )


def _has_port(rule: Object, port: int) -> bool:
    return not rule.get("ports") or any(each["port"] == port for each in rule["ports"])


def _is_from(rule: Object, client: Pod, namespace: str) -> bool:
    """Selectors of one peer are met together; without one for namespaces it is the policy's own."""
    if not rule.get("from"):
        return True
    for peer in rule["from"]:
        is_there = (
            _selects(peer["namespaceSelector"], client.namespace_labels)
            if "namespaceSelector" in peer
            else client.namespace == namespace
        )
        if is_there and _selects(peer.get("podSelector", {}), client.labels):
            return True
    return False


def _selects(selector: Object, labels: Labels) -> bool:
    """By matchLabels; an empty selector selects all."""
    if unknown := set(selector) - {"matchLabels"}:
        raise ValueError(f"selectors with {unknown} are not read here")
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
