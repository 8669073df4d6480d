"""Reads and writes plans, from `epd plan --out` to `epd serve --plan`; validated on read, like profiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # its stubs are another package
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd.encode.sharding import Sharding
from epd.errors import RequestError
from epd.kv.drafting import DraftMethod
from epd.topology import parse_topology
from epd.worker_classes import WorkerClass

FORMAT: Literal["epd plan, version 1"] = "epd plan, version 1"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlanSettings(_Strict):
    """Holds the settings of a plan beside the topology, under the names of the application's arguments.

    None: the plan leaves it open. retention: share of the visual tokens that is kept. tensor_parallel:
    devices of a worker, by its roles, where there is more than one. worker_classes: where devices differ.
    """

    max_batch_patches: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    max_chunk_tokens: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    decode_max_num_seqs: int = Field(ge=1)
    sharding: Sharding
    retention: float = Field(gt=0, le=1)
    dtype: Literal["float32", "bfloat16", "float16"]
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    num_video_threads: int = Field(ge=1)
    video_device: Literal["cuda"] | None = None
    encode_beside: bool | None = None
    draft: DraftMethod | None = None
    max_draft: int | None = Field(default=None, ge=1)
    num_threads: int | None = Field(default=None, ge=1)
    num_kv_tokens: int | None = Field(default=None, ge=1)
    tensor_parallel: dict[str, int] = {}
    worker_classes: dict[str, WorkerClass] = {}


class PlanObjectives(_Strict):
    """Holds objectives in seconds, and the share of requests that must meet them."""

    ttft_s: float | None = Field(default=None, gt=0)
    tpot_s: float | None = Field(default=None, gt=0)
    attainment: float = Field(gt=0, le=1)


class PlanFile(_Strict):
    """Holds a plan as it is written. explanation: the output of `epd plan`; nothing is read from it."""

    format: Literal["epd plan, version 1"]
    model: str
    topology: str
    settings: PlanSettings
    objectives: PlanObjectives
    explanation: dict[str, Any] = {}

    def app_options(self) -> dict[str, Any]:
        """Returns the arguments of the application that the plan decides.

        Raises RequestError for several devices where a server cannot use them.
        """
        decided = self.settings.model_dump(exclude_none=True, exclude={"tensor_parallel", "worker_classes"})
        if self.settings.worker_classes:
            decided["worker_classes"] = self.settings.worker_classes
        if self.settings.tensor_parallel:
            decided |= self._devices()
        if self.objectives.ttft_s is not None:
            decided["slo_ttft_s"] = self.objectives.ttft_s
        return {"topology": self.topology, **decided}

    def _devices(self) -> dict[str, int]:
        """Returns how many devices a worker has: those that only decode, and all others but encoders."""
        groups = parse_topology(self.topology).groups
        degrees = {group.letters: self.settings.tensor_parallel.get(group.letters, 1) for group in groups}
        if not is_served(degrees):
            shown = ", ".join(f"{degree} of {letters}" for letters, degree in degrees.items())
            raise RequestError(
                f"received a plan with these devices a worker: {shown}; allowed are 1 for workers that only "
                "encode, and one number for all that do not only decode; plan again with epd plan"
            )
        size = max(degree for letters, degree in degrees.items() if "p" in letters)
        return {"tensor_parallel_size": size, "decode_tensor_parallel_size": degrees.get("d", size)}

    def check_model(self, name: str) -> None:
        """Raises RequestError for another model. name: of the model's folder, or as requests call it."""
        wanted, found = _words(self.model), _words(name)
        if found[: len(wanted)] != wanted:
            raise RequestError(
                f"the plan is for {self.model!r}, the model to serve is {name!r}; plan for this model, or if "
                f"it is the same say so with --model-name {self.model}"
            )


def is_served(degrees: Mapping[str, int]) -> bool:
    """Returns whether a server has workers of such devices, as `TensorParallel` says. degrees: by letters."""
    shared = {degree for letters, degree in degrees.items() if letters not in ("e", "d")}
    return degrees.get("e", 1) == 1 and len(shared) <= 1


def _words(name: str) -> list[str]:
    """Splits a name so that Qwen2.5-VL-7B-Instruct is a qwen2.5-vl-7b, and Qwen2.5-VL-72B is not."""
    return re.findall(r"[a-z0-9]+", name.lower())


def load_plan(path: Path) -> PlanFile:
    """Loads `epd plan --out` output. Raises RequestError for unknown fields, bad values or invalid YAML."""
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise RequestError(
            f"the plan {str(path)!r} cannot be read; write one with epd plan --out {path.name}"
        ) from None
    except yaml.YAMLError as error:
        raise RequestError(f"the plan {str(path)!r} is no YAML: {' '.join(str(error).split())}") from None
    try:
        return PlanFile.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RequestError(
            f"the plan {str(path)!r}: {where}: {first['msg']}; write one with epd plan --out"
        ) from None
