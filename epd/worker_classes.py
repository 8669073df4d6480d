"""Describes classes of workers: some workers of a topology, with a device and resources of their own.

topology 4e1pd    small=roles:e,device:cpu,num_threads:4    small0 to small3, and pd0 as the options say

A class takes the workers of its roles that no class before it has taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from epd.devices import check_device, check_dtype
from epd.errors import RequestError
from epd.records import BaseModel, ConfigDict, Field, PydanticCustomError, field_validator
from epd.topology import STAGES, Stage, Topology, WorkerGroup, parse_topology, role_letters

# The name of those workers that no class has taken.
REST = ""
_NAME = re.compile(r"[a-z][a-z_-]{0,30}[a-z]")
_ROLES_ALONE = re.compile(r"[epdv]+")
_EXAMPLE = "such as small=roles:e,device:cpu,num_threads:4"
# Options of the server that a class may set for its workers.
OVERRIDES = (
    "device", "dtype", "num_threads", "gpu_memory_utilization", "num_kv_tokens", "num_embeddings",
    "max_batch_patches",
)  # fmt: skip
_CHECKS = {"device": check_device, "dtype": check_dtype}


class WorkerClass(BaseModel):
    """Holds what the workers of a class have of their own. None: as the server's options say.

    roles: letters of a topology. count: of the workers with these roles, None for all that are left
    num_gpus, num_cpus, accelerator_type, resources: that each worker asks Ray for, by Ray's names
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    roles: str
    count: int | None = Field(default=None, ge=1)
    device: str | None = None
    dtype: str | None = None
    num_threads: int | None = Field(default=None, ge=1)
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    num_kv_tokens: int | None = Field(default=None, ge=1)
    num_embeddings: int | None = Field(default=None, ge=16)
    max_batch_patches: int | None = Field(default=None, ge=1)
    num_gpus: float | None = Field(default=None, ge=0)
    num_cpus: float | None = Field(default=None, ge=0)
    accelerator_type: str | None = None
    resources: dict[str, float] | None = None

    @field_validator(*_CHECKS)
    @classmethod
    def _known_name(cls, value: str | None, info: Any) -> str | None:
        try:
            if value is not None:
                _CHECKS[info.field_name](value)
        except RequestError as error:
            raise PydanticCustomError("name", "{reason}", {"reason": str(error)}) from None
        return value

    @property
    def stages(self) -> frozenset[Stage]:
        return frozenset(stage for stage in STAGES if stage[0] in self.roles)

    @property
    def overrides(self) -> dict[str, Any]:
        """Returns the options of the server that the class sets, by their names."""
        return {name: value for name in OVERRIDES if (value := getattr(self, name)) is not None}

    @property
    def ray_actor_options(self) -> dict[str, Any]:
        """Returns what each worker asks Ray for besides GPUs."""
        names = ("num_cpus", "accelerator_type", "resources")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def on(self, device: str) -> Self:
        """Returns the same class on a device."""
        return self.model_copy(update={"device": device})


def given_classes(given: object) -> object:
    """Returns classes by name, of lines NAME=KEY:VALUE,KEY:VALUE or of a mapping. Values are not checked yet.

    Raises RequestError for a line that is none.
    """
    if given is None or isinstance(given, Mapping):
        return given or {}
    lines = [given] if isinstance(given, str) else given
    assert isinstance(lines, Sequence)
    return dict(map(_parsed, lines))


def _parsed(line: str) -> tuple[str, dict[str, str]]:
    name, _, rest = line.partition("=")
    pairs = [each.partition(":") for each in rest.split(",")]
    if not all(key and separator and value for key, separator, value in pairs):
        raise RequestError(
            f"received the worker class {line[:100]!r}; allowed: NAME=KEY:VALUE,KEY:VALUE; write one "
            f"{_EXAMPLE}"
        )
    return name.strip(), {key.strip(): value.strip() for key, _, value in pairs}


def class_parts(topology: str, classes: Mapping[str, WorkerClass]) -> dict[str, Topology]:
    """Returns the workers of each class, and under REST those of none, as far as there are any.

    Raises RequestError for a class that the topology has no workers for, and for a name that others may have.
    """
    groups: list[list[Any]] = [[group.num_workers, group.roles] for group in parse_topology(topology).groups]
    parts: dict[str, Topology] = {}
    for name, each in classes.items():
        if not _NAME.fullmatch(name) or _ROLES_ALONE.fullmatch(name):
            raise RequestError(
                f"received a worker class of the name {name!r}; allowed: small letters, - and _, and no name "
                f"of roles alone; write one {_EXAMPLE}"
            )
        parts[name] = Topology(tuple(_taken(name, each, topology, groups)))
    rest = tuple(WorkerGroup(num, roles) for num, roles in groups if num)
    return ({REST: Topology(rest)} if rest else {}) | parts


def _taken(name: str, wanted: WorkerClass, topology: str, groups: list[list[Any]]) -> list[WorkerGroup]:
    """Takes the workers of a class from the groups that are left."""
    left = sum(num for num, roles in groups if roles == wanted.stages)
    count = left if wanted.count is None else wanted.count
    if role_letters(wanted.stages) != wanted.roles or not 1 <= count <= left:
        asked = "" if wanted.count is None else f"{wanted.count} x "
        raise RequestError(
            f"received the worker class '{name}' of {asked}{wanted.roles!r} in the topology {topology!r}, "
            f"which has {left} such workers left; allowed: roles in the order e, p, d that the topology "
            "names, and at most their number; change --topology or the class"
        )
    taken = count
    for group in groups:
        if group[1] == wanted.stages:
            num = min(count, group[0])
            group[0], count = group[0] - num, count - num
    return [WorkerGroup(taken, wanted.stages)]


def class_workers(parts: Mapping[str, Topology]) -> dict[str, tuple[str, frozenset[Stage]]]:
    """Returns the class and the roles of each worker, by its name: that of the class and a number."""
    named: dict[str, tuple[str, frozenset[Stage]]] = {}
    for name, part in parts.items():
        for number, worker in enumerate(part.workers()):
            named[f"{name}{number}" if name else worker.name] = name, worker.roles
    return named


def check_types(types: Mapping[str, tuple[str, str]], parts: Mapping[str, Topology]) -> None:
    """Raises RequestError where the type that something is computed in would depend on the worker.

    types: dtype and device of each class; where nobody knows yet what they mean, they are not compared
    """
    for verb, stages in (("encode", {"encode"}), ("prefill and decode", {"prefill", "decode"})):
        found = {
            _type_of(*types[name])
            for name, part in parts.items()
            if any(group.roles & stages for group in part.groups)
        }
        known = sorted(each for each in found if each is not None)
        if len(known) > 1:
            raise RequestError(
                f"received workers that {verb} in {' and in '.join(known)}; allowed: one dtype, "
                "since another gives other answers; set a dtype for all of them, such as dtype:bfloat16"
            )


def _type_of(dtype: str, device: str) -> str | None:
    """Returns the type as far as it is known without the model and the machine."""
    if dtype != "auto" or device == "auto":
        return None if dtype == "auto" else dtype
    return "float32" if device == "cpu" else "the checkpoint's type on a GPU"
