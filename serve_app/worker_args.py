"""Defines the arguments that say which workers an application has, and what each of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Literal, Self

from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.machine import usable_cpus
from epd.records import Field, PydanticCustomError, field_validator
from epd.topology import Stage, TensorParallel, Topology, parse_topology
from epd.worker_classes import REST, WorkerClass, check_types, class_parts, class_workers, given_classes

_VIDEO: frozenset[Stage] = frozenset({"video"})
_KV_ROLES: frozenset[Stage] = frozenset({"prefill", "decode"})


class WorkerArgs(EngineConfig):
    """Holds the arguments of the application that decide its workers; see `AppArgs`."""

    topology: str = Field(
        default="1e1p1d",
        description="Workers, each number before the roles it counts: e encodes, p prefills, d decodes; "
        "1epd is one worker with all roles.",
    )
    worker_classes: dict[str, WorkerClass] = Field(
        default_factory=dict,
        description="Workers of the topology with a device and resources of their own, such as "
        "small=roles:e,device:cpu,num_threads:4; in YAML a mapping of each name.",
    )
    gpus_per_worker: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="GPUs that each stage worker asks Ray for; below 1, workers share a GPU and its memory: "
        "with 0.33, 1e1p1d fits one. By default 1 with a device of cuda, and with auto what fits. With a "
        "tensor_parallel_size, for each of its processes.",
    )
    decode_tensor_parallel_size: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="The same for workers that only decode; by default tensor_parallel_size.",
    )
    encode_beside: bool = Field(
        default=True,
        description="In workers with other roles too, run the vision encoder in a thread of its own, on a "
        "GPU in its own stream, so that encoding does not stall decodes.",
    )
    connector: Literal["link", "nixl"] = Field(
        default="link",
        description="How embeddings, keys and values reach workers of other machines: link (TCP), or nixl, "
        "which has RDMA where the network does and needs epd-vlm[nixl].",
    )
    num_video_workers: int = Field(default=1, ge=1, le=64, description="Workers that decode video.")
    elastic: bool = Field(default=False, description="Let workers change roles as the load changes.")

    @field_validator("worker_classes", mode="before")
    @classmethod
    def _given_classes(cls, given: object) -> object:
        try:
            return given_classes(given)
        except RequestError as error:
            raise PydanticCustomError("classes", "{reason}", {"reason": str(error)}) from None

    @property
    def num_stage_workers(self) -> int:
        return parse_topology(self.topology).num_workers

    @property
    def threads_per_worker(self) -> int:
        """Returns torch threads per stage worker. One core is left to HTTP and Ray; workers share it."""
        share = (usable_cpus() - 1) // sum(self.num_ranks(roles) for roles in self._stage_roles)
        return self.num_threads or max(1, share)

    @property
    def num_kv_pools(self) -> int:
        """Returns how many KV pools workers may have at once: one for each role that needs one, and one for
        each other worker, which may be given such a role; each rank has its own."""
        return sum(max(1, len(roles & _KV_ROLES)) * self.num_ranks(roles) for roles in self._stage_roles)

    @property
    def _stage_roles(self) -> list[frozenset[Stage]]:
        """Lists the roles of each stage worker."""
        return [worker.roles for worker in parse_topology(self.topology).workers()]

    @property
    def parts(self) -> Mapping[str, Topology]:
        """Returns the stage workers of each class. Raises RequestError for what the topology has not."""
        return class_parts(self.topology, self.worker_classes)

    @property
    def classes(self) -> Mapping[str, str]:
        """Returns the class of each stage worker by name."""
        return {name: worker_class for name, (worker_class, _) in class_workers(self.parts).items()}

    def of_class(self, name: str) -> Self:
        """Returns a copy for the workers of a class: with what it sets in place of everybody's."""
        return self.model_copy(update=self.worker_classes[name].overrides) if name != REST else self

    def on_devices(self, device_of: Callable[[str], str]) -> Self:
        """Returns a copy whose workers of each class have their device by name. device_of: by class."""
        classes = {name: each.on(device_of(name)) for name, each in self.worker_classes.items()}
        return self.model_copy(update={"worker_classes": classes, "device": device_of(REST)})

    @property
    def tensor_parallel(self) -> TensorParallel:
        return TensorParallel(self.tensor_parallel_size, self.decode_tensor_parallel_size)

    def num_ranks(self, roles: frozenset[Stage]) -> int:
        """Returns the processes that share the language model of a worker that starts with these roles.

        Where roles follow the load, any worker may get one.
        """
        return self.tensor_parallel.max_size if self.elastic else self.tensor_parallel.num_ranks(roles)

    @property
    def max_ranks(self) -> int:
        """Returns the most processes of any worker of the topology."""
        return max(map(self.num_ranks, self._stage_roles))

    def check_workers(self) -> None:
        """Raises RequestError for a bad topology, and for what its workers cannot do."""
        parse_topology(self.topology)
        _check_ranks(self)
        self.check_classes()
        if self.connector == "nixl" and find_spec("nixl") is None:
            raise RequestError(
                "received connector nixl; allowed: where the package nixl is installed; install "
                "epd-vlm[nixl] on every machine, or leave it at link"
            )

    def check_classes(self) -> None:
        """Raises RequestError for classes that cannot work together."""
        parts = self.parts
        if self.elastic and REST not in parts:
            raise RequestError(
                f"received elastic with worker_classes {', '.join(self.worker_classes)}, which have all "
                "workers; allowed: beside workers of no class, since those of a class keep their roles; "
                "leave one out, or take a larger topology"
            )
        if self.worker_classes:
            own = {name: self.of_class(name) for name in parts}
            if self.elastic:  # who changes roles may do all that others do
                parts = {**parts, REST: parse_topology(self.topology)}
            check_types({name: (each.dtype, each.device) for name, each in own.items()}, parts)

    @property
    def workers(self) -> Mapping[str, frozenset[Stage]]:
        """Returns the roles of each worker by name. Raises RequestError for an invalid topology."""
        workers = {name: roles for name, (_, roles) in class_workers(self.parts).items()}
        return workers | {f"v{number}": _VIDEO for number in range(self.num_video_workers)}


def _check_ranks(args: WorkerArgs) -> None:
    """Raises RequestError for what workers of several processes cannot do."""
    received = f"received a tensor_parallel_size of {args.tensor_parallel_size}"
    if args.elastic and not args.tensor_parallel.is_uniform:
        raise RequestError(
            f"{received} and a decode_tensor_parallel_size of {args.decode_tensor_parallel_size} with "
            "elastic; allowed: the same for both; leave the second out"
        )
    if args.max_ranks > 1 and args.gpus_per_worker not in (None, 0, 1):
        raise RequestError(
            f"{received} and gpus_per_worker {args.gpus_per_worker:g}; allowed: 1, a GPU for each of the "
            "processes, or 0; set one of these"
        )
