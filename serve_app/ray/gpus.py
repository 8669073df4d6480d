"""Divides the GPUs of a cluster among stage workers, and finds the one that Ray gave to a worker.

deployer   gpus_per_worker, or what fits the cluster  -->  num_gpus of every replica of a class
worker     num_gpus below 1: the GPU is shared, and torch takes no more than that share: memory_limit.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from epd.errors import InfeasibleError
from epd.serve_app.app_args import AppArgs
from epd.topology import Topology
from epd.types import ceil_div
from epd.worker_classes import REST

# With it Ray shows every GPU to every worker, so that those of one machine can open each other's pools.
_SHOWS_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_by_class(args: AppArgs, num_gpus: float) -> dict[str, float]:
    """Returns the GPUs that each worker asks Ray for, by class. num_gpus: of the cluster.

    Any replica of a class may be given any of its roles, so all of them ask for those of the largest.
    """
    return {
        name: _own_gpus(args, name)
        if _has_own_gpus(args, name)
        else gpus_per_rank(args, num_gpus, name) * _num_ranks(args, name)
        for name in args.parts
    }


def _has_own_gpus(args: AppArgs, name: str) -> bool:
    own = args.worker_classes.get(name)
    return own is not None and (own.num_gpus is not None or own.device == "cpu")


def _own_gpus(args: AppArgs, name: str) -> float:
    return args.worker_classes[name].num_gpus or 0.0


def _num_ranks(args: AppArgs, name: str) -> int:
    return max(args.num_ranks(group.roles) for group in args.parts[name].groups)


def gpus_per_rank(args: AppArgs, num_gpus: float, name: str = REST) -> float:
    """Returns the GPUs of each process of a class that computes. num_gpus: of the cluster."""
    device = args.of_class(name).device
    if args.gpus_per_worker is not None:
        return args.gpus_per_worker
    if device == "auto" and args.max_ranks > 1:
        return 1.0 if num_gpus >= 1 else 0.0
    if device == "auto":
        parts = args.parts
        own = {each for each in parts if _has_own_gpus(args, each)}
        left = num_gpus - sum(_own_gpus(args, each) * parts[each].num_workers for each in own)
        num_others = sum(parts[each].num_workers for each in parts.keys() - own) or 1
        if num_gpus >= 1 > left:  # of one GPU that classes share
            return int(100 * max(0.0, left) / num_others + 1e-6) / 100
        return largest_share(num_others, left)
    return 1.0 if device.startswith("cuda") else 0.0


def on_given_devices(args: AppArgs, by_class: Mapping[str, float]) -> AppArgs:
    """Returns arguments in which classes that are to run on what is there run on what they are given.

    Raises RequestError where they would then compute in types that differ.
    """
    if not args.worker_classes:
        return args

    def device_of(name: str) -> str:
        device = args.of_class(name).device
        return device if device != "auto" else "cuda" if by_class.get(name) else "cpu"

    settled = args.on_devices(device_of)
    settled.check_classes()
    return settled


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
    num_all, parts = cluster_gpus(), args.parts
    num_gpus = min(num_all, free_gpus(num_all))
    counted = num_gpus if num_gpus >= 1 else num_all  # where none is free, that is what is told
    by_class = gpus_by_class(args, counted)
    wanted = [by_class[name] for name, part in parts.items() for _ in part.workers()]
    nodes = node_gpus() if max(wanted) > 1 and num_gpus == num_all else [num_gpus]
    if not are_fitting(wanted, nodes):
        has_share = args.max_ranks == 1 and not args.worker_classes
        share = largest_share(len(wanted), num_gpus) if has_share else 0.0
        advice = f"set gpus_per_worker to {share:g}, so that workers share, " if share else ""
        taken = "" if num_gpus == num_all else f", of which others leave {num_gpus:g} free"
        raise InfeasibleError(
            f"received {_asked(parts, by_class)}; the cluster has {num_all:g} "
            f"GPUs{taken}; {advice}choose a smaller topology, add GPUs, or run on CPUs with --device cpu"
        )
    return args.model_copy(update={"gpus_per_worker": gpus_per_rank(args, counted)})


def _asked(parts: Mapping[str, Topology], by_class: Mapping[str, float]) -> str:
    """Describes the workers and their GPUs, class by class."""
    return " and ".join(
        f"{part.num_workers} stage workers of {by_class[name]:g} GPUs each{f' ({name})' if name else ''}"
        for name, part in parts.items()
    )


def are_fitting(wanted: Sequence[float], nodes: Sequence[float]) -> bool:
    """Returns whether workers of these GPUs fit the machines. nodes: GPUs of each

    No share lies on two GPUs, and no worker on two machines.
    """
    free = [[1.0] * int(num) for num in nodes]
    for each in sorted(filter(None, wanted), reverse=True):
        part = min(each, 1.0)
        for gpus in free:
            places = [index for index, left in enumerate(gpus) if left + 1e-6 >= part][: math.ceil(each)]
            if len(places) == math.ceil(each):
                for index in places:
                    gpus[index] -= part
                break
        else:
            return False
    return True


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
