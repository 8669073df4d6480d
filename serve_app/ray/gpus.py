"""Divides the GPUs of a cluster among stage workers, and finds the one that Ray gave to a worker.

deployer   gpus_per_worker, or what fits the cluster  -->  num_gpus of every replica of Stage
worker     num_gpus below 1: the GPU is shared, and torch takes no more than that share: memory_limit.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from epd.errors import InfeasibleError
from epd.serve_app.app_args import AppArgs
from epd.types import ceil_div

# With it Ray shows every GPU to every worker, so that those of one machine can open each other's pools.
_SHOWS_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_per_worker(args: AppArgs, num_gpus: float) -> float:
    """Returns the GPUs that a stage worker asks Ray for. num_gpus: of the cluster.

    Any replica may be given any roles, so all of them ask for those of the largest.
    """
    return gpus_per_rank(args, num_gpus) * args.max_ranks


def gpus_per_rank(args: AppArgs, num_gpus: float) -> float:
    """Returns the GPUs of each process that computes. num_gpus: of the cluster."""
    if args.gpus_per_worker is not None:
        return args.gpus_per_worker
    if args.device == "auto" and args.max_ranks > 1:
        return 1.0 if num_gpus >= 1 else 0.0
    if args.device == "auto":
        return largest_share(args.num_stage_workers, num_gpus)
    return 1.0 if args.device.startswith("cuda") else 0.0


def largest_share(num_workers: int, num_gpus: float) -> float:
    """Returns the largest share of a GPU, 1 at most, with which all workers fit; 0 without GPUs."""
    return 100 // ceil_div(num_workers, int(num_gpus)) / 100 if num_gpus >= 1 else 0.0


def cluster_gpus() -> float:
    """Returns the GPUs of the cluster that this process is connected to; 0 if it is connected to none."""
    if not ray.is_initialized():
        return 0.0
    resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)


def free_gpus(num_all: float) -> float:
    """Returns the GPUs that no other application has. num_all: of the cluster, for none that is connected."""
    if not num_all or not ray.is_initialized():
        return num_all
    resources: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)


def node_gpus() -> list[float]:
    """Returns the GPUs of each machine of the cluster."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"]]


def with_gpus(args: AppArgs) -> AppArgs:
    """Returns arguments in which the workers' GPUs are settled by the cluster that is connected.

    Raises InfeasibleError if the cluster has too few: Serve would wait for more without an end.
    """
    num_all, num_workers = cluster_gpus(), args.num_stage_workers
    num_gpus = min(num_all, free_gpus(num_all))
    counted = num_gpus if num_gpus >= 1 else num_all  # where none is free, that is what is told
    wanted = gpus_per_worker(args, counted)
    nodes = node_gpus() if wanted > 1 and num_gpus == num_all else [num_gpus]
    if sum(num_fitting(wanted, each) for each in nodes) < num_workers:
        share = largest_share(num_workers, num_gpus) if args.max_ranks == 1 else 0.0
        advice = f"set gpus_per_worker to {share:g}, so that workers share, " if share else ""
        taken = "" if num_gpus == num_all else f", of which others leave {num_gpus:g} free"
        raise InfeasibleError(
            f"received {num_workers} stage workers of {wanted:g} GPUs each; the cluster has {num_all:g} "
            f"GPUs{taken}; {advice}choose a smaller topology, add GPUs, or run on CPUs with --device cpu"
        )
    return args.model_copy(update={"gpus_per_worker": gpus_per_rank(args, counted)})


def num_fitting(wanted: float, num_gpus: float) -> float:
    """Returns how many workers of `wanted` GPUs fit a machine: no share below 1 lies on two GPUs."""
    if not wanted:
        return float("inf")
    if wanted > 1:
        return num_gpus // wanted
    return int(num_gpus) * int(1 / wanted + 1e-6)


def worker_device(device: str) -> str:
    """Returns the device of this worker, as `Placement.resolve` takes it. device: of the arguments."""
    if device == "auto" and not assigned_gpus():
        return "cpu"  # GPUs that it may see are those of others
    if device in ("auto", "cuda") and os.environ.get(_SHOWS_ALL, "") not in ("", "0"):
        ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if len(ids) > 1:
            os.environ[_VISIBLE] = ",".join(own_first(ids, os.environ.get(_VISIBLE, "")))
            return "cuda:0"
        return f"cuda:{ids[0]}" if ids else "cuda"
    return device


def own_first(ids: Sequence[str], visible: str) -> list[str]:
    """Returns the GPUs of a machine with those of this worker first: its ranks have one after the other.

    visible: as in CUDA_VISIBLE_DEVICES, which says nothing of others if it is empty.
    """
    return [*ids, *(each for each in visible.split(",") if each and each not in ids)]


def assigned_gpus() -> float:
    """Returns the GPUs that Ray gave to this worker."""
    context = ray.get_runtime_context()
    resources: Mapping[str, float] = context.get_assigned_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)
