"""GPUs of stage workers: who asks for how many, what each sees. Ray is told of GPUs that do not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

from epd.errors import InfeasibleError
from epd.serve_app.app_args import AppArgs
from epd.serve_app.ray import gpus
from epd.worker_classes import REST
from tests import ROOT
from tests.serve_app.conftest import JSON

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own, when it is imported
    from ray.serve._private.build_app import build_app as built

    from epd.serve_app.app import build_app


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other application has GPUs; a cluster of another test may be connected, which has none."""
    monkeypatch.setattr(gpus, "free_gpus", lambda num_all: num_all)


@pytest.mark.parametrize(
    ("args", "num_gpus", "expected"),
    [
        ({"device": "cpu"}, 8, 0),
        ({"device": "cuda"}, 0, 1),
        ({"device": "cuda:1"}, 8, 1),
        ({"device": "auto"}, 0, 0),
        ({"device": "auto"}, 8, 1),
        ({"device": "auto"}, 2, 0.5),
        ({"device": "auto"}, 1, 0.33),
        ({"device": "auto", "topology": "1e1p2d"}, 3, 0.5),
        ({"device": "auto", "gpus_per_worker": 0.25}, 8, 0.25),
        ({"device": "cpu", "gpus_per_worker": 0}, 8, 0),
    ],
)
def test_a_worker_asks_for_a_gpu_where_it_runs_on_one(
    args: dict[str, Any], num_gpus: float, expected: float
) -> None:
    assert gpus.gpus_by_class(AppArgs(**args), num_gpus) == {REST: expected}


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_no_worker_has_more_than_one_gpu(share: float) -> None:
    with pytest.raises(ValueError, match="gpus_per_worker"):
        AppArgs(gpus_per_worker=share)


@pytest.mark.parametrize(
    ("share", "num_gpus", "num_workers"),
    [(1, 2, 2), (0.5, 2, 4), (0.33, 1, 3), (0.34, 1, 2), (0.1, 1, 10), (0.6, 2, 2), (1, 0, 0)],
)
def test_no_share_lies_on_two_gpus(share: float, num_gpus: float, num_workers: int) -> None:
    assert gpus.are_fitting([share] * num_workers, [num_gpus])
    assert not gpus.are_fitting([share] * (num_workers + 1), [num_gpus])


@pytest.mark.parametrize(
    ("args", "num_gpus", "words"),
    [
        ({"device": "cuda"}, 0, "3 stage workers of 1 GPUs each; the cluster has 0 GPUs; choose a smaller"),
        ({"device": "cuda"}, 1, "the cluster has 1 GPUs; set gpus_per_worker to 0.33, so that workers share"),
        (
            {"device": "cuda", "topology": "1e1p2d"},
            3,
            "4 stage workers of 1 GPUs each; the cluster has 3 GPUs; set gpus_per",
        ),
        ({"gpus_per_worker": 0.5}, 1, "3 stage workers of 0.5 GPUs each"),
    ],
)
def test_a_cluster_with_too_few_gpus_is_refused_in_one_line(
    args: dict[str, Any], num_gpus: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: num_gpus)
    with pytest.raises(InfeasibleError, match=words) as raised:
        gpus.with_gpus(AppArgs(**args))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("classes", "options", "num_gpus", "expected"),
    [
        (["small=roles:e,device:cpu"], {}, 1, {"": 1, "small": 0}),
        (["small=roles:e,device:cpu"], {"device": "cuda"}, 1, {"": 1, "small": 0}),
        (["small=roles:e,num_gpus:0.1"], {}, 1, {"": 0.6, "small": 0.1}),
        (["small=roles:e,num_gpus:0.1"], {"gpus_per_worker": 0.5}, 1, {"": 0.5, "small": 0.1}),
        (["small=roles:e,count:2,device:cpu"], {}, 1, {"": 0.33, "small": 0}),
        (["small=roles:e,device:cpu"], {}, 0, {"": 0, "small": 0}),
        (
            ["small=roles:e,num_gpus:1", "large=roles:pd"],
            {"tensor_parallel_size": 4},
            8,
            {"small": 1, "large": 4},
        ),
    ],
)  # fmt: skip
def test_each_class_asks_for_the_gpus_of_its_own_roles(
    classes: list[str],
    options: JSON,
    num_gpus: float,
    expected: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = AppArgs(topology="4e1pd", worker_classes=classes, **options)
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: num_gpus)
    monkeypatch.setattr(gpus, "node_gpus", lambda: [num_gpus])
    assert gpus.gpus_by_class(gpus.with_gpus(args), num_gpus) == pytest.approx(expected)


def test_classes_that_do_not_fit_the_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    args = AppArgs(topology="4e1pd", device="cuda", worker_classes=["small=roles:e,num_gpus:0.5"])
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: 2.0)
    words = (
        r"received 1 stage workers of 1 GPUs each and 4 stage workers of 0.5 GPUs each \(small\); "
        "the cluster has 2 GPUs; choose a smaller topology"
    )
    with pytest.raises(InfeasibleError, match=words):
        gpus.with_gpus(args)
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: 3.0)
    assert gpus.with_gpus(args).gpus_per_worker == 1


def test_each_class_is_a_deployment_with_what_it_asks_for() -> None:
    classes = {
        "small": {"roles": "e", "count": 3, "device": "cpu", "num_cpus": 2, "resources": {"cheap": 1}},
        "other": {
            "roles": "e",
            "num_gpus": 0.25,
            "accelerator_type": "L4",
            "device": "cuda",
            "dtype": "float32",
        },
    }
    app = built(build_app(AppArgs(topology="4e1pd", worker_classes=classes)), name="epd")
    found = {each.name: each for each in app.deployments if each.name.startswith("Stage")}
    assert {name: each.num_replicas for name, each in found.items()} == {
        "Stage": 1, "Stage-small": 3, "Stage-other": 1,
    }  # fmt: skip
    asked = {name: each.ray_actor_options for name, each in found.items()}
    assert asked["Stage"] == {"num_cpus": 0, "num_gpus": 0}
    assert asked["Stage-small"] == {"num_cpus": 2, "num_gpus": 0, "resources": {"cheap": 1}}
    assert asked["Stage-other"] == {"num_cpus": 0, "num_gpus": 0.25, "accelerator_type": "L4"}
    args, *name = found["Stage-small"].init_args
    assert (name, args.of_class("small").device, args.of_class("").device) == (["small"], "cpu", "cpu")


def test_the_advised_share_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: 1.0)
    assert gpus.with_gpus(AppArgs(gpus_per_worker=0.33)).gpus_per_worker == 0.33
    assert gpus.with_gpus(AppArgs(device="cpu")).gpus_per_worker == 0


def test_only_stage_workers_ask_for_gpus() -> None:
    found = {
        each.name: each.ray_actor_options
        for each in built(build_app(AppArgs(gpus_per_worker=0.5)), name="epd").deployments
    }
    assert {name: options.get("num_gpus", 0) for name, options in found.items()} == {
        "Front": 0, "Media": 0, "Stage": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "num_gpus", "expected"),
    [
        ({"device": "cuda", "tensor_parallel_size": 2}, 0, 2),
        ({"tensor_parallel_size": 2}, 8, 2),
        ({"tensor_parallel_size": 2}, 0, 0),
        ({"tensor_parallel_size": 2, "decode_tensor_parallel_size": 4}, 16, 4),
        ({"tensor_parallel_size": 2, "decode_tensor_parallel_size": 4, "topology": "1epd"}, 16, 2),
    ],
)
def test_a_group_of_processes_asks_for_a_gpu_each(
    args: dict[str, Any], num_gpus: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus.gpus_by_class(AppArgs(**args), num_gpus) == {REST: expected}
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: num_gpus)
    monkeypatch.setattr(gpus, "node_gpus", lambda: [num_gpus])
    if num_gpus or not expected:
        settled = gpus.with_gpus(AppArgs(**args))
        assert gpus.gpus_by_class(settled, num_gpus) == {REST: expected}, "asked again"


def test_a_group_of_processes_is_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    args = AppArgs(topology="1ep1d", tensor_parallel_size=4)
    monkeypatch.setattr(gpus, "cluster_gpus", lambda: 8.0)
    monkeypatch.setattr(gpus, "node_gpus", lambda: [2.0, 6.0])
    with pytest.raises(InfeasibleError, match="2 stage workers of 4 GPUs each; the cluster has 8 GPUs;"):
        gpus.with_gpus(args)
    monkeypatch.setattr(gpus, "node_gpus", lambda: [4.0, 4.0])
    assert gpus.with_gpus(args).gpus_per_worker == 1


def test_a_worker_that_sees_all_gpus_has_its_own_first() -> None:
    assert gpus.own_first(["3", "5"], "0,1,3,4,5") == ["3", "5", "0", "1", "4"]
    assert gpus.own_first(["3", "5"], "") == ["3", "5"]


# Replicas of Serve are such actors, and take twice the CPU to start.
_PROBE = """
import json, os
import ray
from epd.serve_app.ray.gpus import cluster_gpus, worker_device

@ray.remote(num_cpus=0)
class Probe:
    def seen(self):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible, worker_device("auto"), worker_device("cuda")

def seen(share, num_workers, env_vars):
    options = {"num_gpus": share, "runtime_env": {"env_vars": env_vars}}
    probes = [Probe.options(**options).remote() for _ in range(num_workers)]
    return ray.get([probe.seen.remote() for probe in probes])

ray.init(address="local", num_gpus=2, num_cpus=1, include_dashboard=False, log_to_driver=False)
shows_all = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
print("FOUND", json.dumps({
    "gpus": cluster_gpus(), "whole": seen(1, 2, {}), "half": seen(0.5, 4, {}), "none": seen(0, 1, {}),
    "shown": seen(1, 2, shows_all),
}))
"""


@pytest.mark.timeout(2000)
def test_workers_see_the_gpus_that_they_were_given() -> None:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROBE],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("FOUND")] or [run.stderr[-2000:]]
    found = json.loads(line.removeprefix("FOUND"))
    assert found["gpus"] == 2
    assert sorted(found["whole"]) == [["0", "auto", "cuda"], ["1", "auto", "cuda"]]
    assert sorted(visible for visible, *_ in found["half"]) == ["0", "0", "1", "1"]
    assert [device for _, device, _ in found["none"]] == ["cpu"]
    assert sorted(found["shown"]) == [["0,1", "cuda:0", "cuda:0"], ["0,1", "cuda:1", "cuda:1"]]
