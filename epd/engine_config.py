"""Says how an engine runs: the one record of its options, from the flags of every command to the builder.

A new option is a field here and the line that reads it. The commands that run a model get its flag, with the
description as its help; `epd serve` and its YAML get it by `AppArgs`, and `epd.LLM` by the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from epd.devices import DTYPE_NAMES, check_device, check_dtype
from epd.encode.sharding import FIRST_GROUP_TOKENS, GROUP_TOKENS
from epd.errors import RequestError
from epd.kv.drafting import (
    DEFAULT_DRAFT,
    DEFAULT_MAX_DRAFT,
    MOST_DRAFTS,
    DraftConfig,
    DraftMethod,
    as_draft_method,
)
from epd.lora_modules import LoRAModule, lora_modules
from epd.pixel_settings import PIXEL_FIELDS, PixelSettings, option
from epd.records import Field, PydanticCustomError, ValidationInfo, field_validator
from epd.reduction import LEAST_TOWER_SHARE, SELECTION_METHODS, TowerMerge, check_tolerance, tower_merge
from epd.store.object_store import check_url

# Families whose layers have a recurrent state, a sliding window, or media that attend each other across the
# prompt, by `model_type` of config.json.
RECURRENT_FAMILIES = ("minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe")
WINDOWED_FAMILIES = ("aya_vision", "cohere2_vision", "gemma3", "gemma4")
BOTH_WAYS_FAMILIES = ("molmo2",)
DEFAULT_HUB = "huggingface"
HUB_NAMES = (DEFAULT_HUB, "modelscope")


def check_hub(name: str) -> None:
    """Raises RequestError for a hub that is none."""
    if name not in HUB_NAMES:
        raise RequestError(f"received a hub of '{name}'; allowed: {', '.join(HUB_NAMES)}; choose one of them")


KV_CACHE_DTYPES = ("auto", "int8_values")


def check_kv_cache_dtype(name: str) -> None:
    """Raises RequestError for a type in which keys and values are not kept."""
    if name not in KV_CACHE_DTYPES:
        raise RequestError(
            f"received the kv_cache_dtype '{name}'; allowed: {', '.join(KV_CACHE_DTYPES)}; use int8_values "
            "for fewer bits, since some models lose their answers with keys in 8"
        )


QUANTIZATIONS = ("fp8",)


def check_quantization(name: str | None) -> None:
    """Raises RequestError for a way in which weights are not quantised when they are loaded."""
    if name is not None and name not in QUANTIZATIONS:
        raise RequestError(
            f"received the quantization '{name}'; allowed: {', '.join(QUANTIZATIONS)}; leave it out for the "
            "weights as they are, since quantised checkpoints need none"
        )


def check_cache_dir(folder: Path | None) -> None:
    """Raises RequestError for a URL."""
    if folder is not None and folder.parts[:1] in (("s3:",), ("gs:",), ("file:",)):
        raise RequestError(
            f"received the cache directory '{folder}'; allowed: a folder of this machine; give the URL as "
            "cache_objects beside it"
        )


# Fields whose values are checked, and by what.
_CHECKS: Mapping[str, Callable[..., object]] = {
    "device": check_device,
    "cache_dir": check_cache_dir,
    "cache_objects": check_url,
    "dtype": check_dtype,
    "kv_cache_dtype": check_kv_cache_dtype,
    "quantization": check_quantization,
    "hub": check_hub,
    "max_draft": lambda value: DraftConfig(max_draft=value),
    "lora_modules": lambda value: lora_modules(value or ()),
    "skip_static": check_tolerance,
    "tower_share": lambda value: value is None or TowerMerge(value),
    "tower_merge_layer": lambda value: TowerMerge(1, value),
}


class EngineConfig(PixelSettings):
    """Holds the options of an engine. Every field is a flag of the commands that run a model."""

    device: str = Field(
        default="auto",
        description="Where the model runs: cpu, cuda, or cuda:N for one of several GPUs; auto is a GPU if "
        "there is one.",
    )
    dtype: str = Field(
        default="auto",
        description=f"Type of weights and activations: {', '.join(DTYPE_NAMES)}; auto is the model's own on "
        "a GPU and float32 on a CPU.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that share the language model of a worker, each on a GPU of its own.",
    )
    async_scheduling: bool | None = Field(
        default=None,
        description="Launch a pass before the tokens of the one before are read, where none is drafted; "
        "by default on GPUs.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Launch every kernel of decodes, and of small passes and calls of a vision tower, "
        "instead of CUDA graphs captured at start.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Threads of torch; by default OMP_NUM_THREADS or all cores; a server divides the cores "
        "among its workers.",
    )
    quantization: str | None = Field(
        default=None,
        description="fp8 brings the language model's layers to FP8 when they are loaded, with a scale for "
        "each row of a matrix, and what they multiply token by token. By default weights stay as they are.",
    )
    kv_cache_dtype: str = Field(
        default=KV_CACHE_DTYPES[0],
        description="Type of keys and values in the KV cache: auto is that of activations; int8_values keeps "
        "values in 8 bits with a scale for each head of a token, and keys in that of activations.",
    )
    num_kv_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that each worker's KV cache holds; by default set by the memory.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of its GPU's memory that a worker may use. Keys and values get what remains after "
        "weights, the largest passes and embeddings, unless num_kv_tokens is set.",
    )
    group_tokens: int = Field(
        default=GROUP_TOKENS,
        ge=1,
        description="Visual tokens that are encoded and prefilled together, about; the first ones of a video "
        f"are {FIRST_GROUP_TOKENS} at most.",
    )
    skip_static: float | None = Field(
        default=None,
        description="Tolerance for skipping static frames: a unit of a video is not encoded when no "
        "preprocessed value differs by more from the unit before; 0 requires equality. By default all are "
        "encoded.",
    )
    tower_share: float | None = Field(
        default=None,
        description="Share of a picture's tokens that later layers of the vision tower compute, "
        f"{LEAST_TOWER_SHARE} to 1; neighbours that look alike are merged. By default all, or 0.76 "
        "for the reduction mustdrop.",
    )
    tower_merge_layer: int | None = Field(
        default=None,
        description="Layers of the tower before neighbours are merged; by default a quarter. Only with "
        "tower_share.",
    )
    cache_dir: Path | None = Field(
        default=None,
        description="Folder in which keys and values of media and their embeddings are kept, so that a later "
        "question about them finds them after a restart, and in other workers that have the folder; by "
        "default none are.",
    )
    cache_bytes: int = Field(
        default=20_000_000_000,
        ge=1_000_000,
        description="Bytes of cache_dir at most; what was not used for longest goes first.",
    )
    cache_objects: str | None = Field(
        default=None,
        description="Object store beneath cache_dir, which several machines share: s3://BUCKET/PREFIX, "
        "gs://BUCKET/PREFIX or file:///FOLDER. Needs epd-vlm[cloud].",
    )
    revision: str | None = Field(
        default=None,
        description="Branch, tag or commit of a model that is named as at its hub; by default main, at "
        "ModelScope master.",
    )
    hub: str = Field(
        default=DEFAULT_HUB,
        description=f"Where a model that is named comes from: {' or '.join(HUB_NAMES)}.",
    )
    lora_modules: frozenset[str] | None = Field(
        default=None,
        description="LoRA adapters that requests may name as their model: NAME=PATH with the folder of "
        "PEFT's files; repeat the option for more.",
    )
    draft: DraftMethod = Field(
        default=DEFAULT_DRAFT,
        description="What proposes the next tokens, for one pass to check: none, prompt-lookup (repetition), "
        "recycling (what followed before), auto (what pays of the two for a request) or mtp (the head that "
        "checkpoints of Qwen3.5 have for it). Answers stay the same.",
    )
    max_draft: int = Field(
        default=DEFAULT_MAX_DRAFT,
        description=f"Tokens drafted at most for one request in one pass, 1 to {MOST_DRAFTS}.",
    )

    @field_validator("draft", mode="before")
    @classmethod
    def _known_method(cls, name: object) -> object:
        return _allowed(as_draft_method, name)

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _given_modules(cls, given: object) -> object:
        return given or None

    @field_validator(*_CHECKS)
    @classmethod
    def _checked_value(cls, value: object, info: ValidationInfo) -> object:
        return _allowed(_CHECKS[info.field_name or ""], value)

    @classmethod
    def checked(cls, values: Mapping[str, object]) -> Self:
        config = super().checked(values)
        _ = config.tower_merge  # one of its options alone is refused
        return config

    def check_cache(self) -> None:
        """Raises RequestError for an object store without a folder above it."""
        if self.cache_objects is not None and self.cache_dir is None:
            raise RequestError(
                "received a cache_objects without a cache_dir; allowed: both; give a folder of this machine, "
                "which is read first"
            )

    @property
    def engine(self) -> EngineConfig:
        """Returns these fields alone, of a record that has more."""
        return EngineConfig(**{name: getattr(self, name) for name in ENGINE_FIELDS})

    @property
    def adapters(self) -> tuple[LoRAModule, ...]:
        """Returns the LoRA adapters, by name. Raises RequestError."""
        return lora_modules(self.lora_modules or ())

    @property
    def drafting(self) -> DraftConfig:
        return DraftConfig(self.draft, self.max_draft)

    @property
    def has_draft_head(self) -> bool:
        """Returns whether workers load the model's own head for drafts."""
        return self.draft == "mtp"

    @property
    def int8_values(self) -> bool:
        return self.kv_cache_dtype == "int8_values"

    @property
    def tower_merge(self) -> TowerMerge | None:
        """Returns how many tokens later layers of the tower compute. Raises RequestError."""
        return tower_merge(self.tower_share, self.tower_merge_layer)

    @property
    def visual_text(self) -> str:
        """Returns what is given of that changes which embeddings media have, for people."""
        return ", ".join(f"{name}={value}" for name, value in self.given.items() if name in _VISUAL_FIELDS)

    def check_at_server(self) -> None:
        """Raises RequestError where anything is given: a running server has its own values."""
        for name, value in self.given.items():
            raise RequestError(
                f"received {option(name)} {value} for a running server, which has its own value; give it to "
                "epd serve"
            )


def _allowed(check: Callable[..., object], value: object) -> object:
    """Returns the value. Raises pydantic's error with the words of the check that refuses it."""
    try:
        check(value)
    except RequestError as error:
        raise PydanticCustomError("refused", "{reason}", {"reason": str(error)}) from None
    return value


ENGINE_FIELDS = tuple(EngineConfig.model_fields)
DEFAULT_ENGINE = EngineConfig()
_VISUAL_FIELDS = frozenset((*PIXEL_FIELDS, "skip_static", "tower_share", "tower_merge_layer"))


def check_reduction(folder: Path, method: str) -> None:
    """Raises RequestError for a method that the model at `folder` cannot do."""
    kinds = dict.fromkeys(RECURRENT_FAMILIES, "a recurrent state")
    kinds |= dict.fromkeys(WINDOWED_FAMILIES, "a sliding window")
    kinds |= dict.fromkeys(BOTH_WAYS_FAMILIES, "media that attend each other")
    model_type = _model_type(folder)
    if model_type in kinds and method not in SELECTION_METHODS:
        raise RequestError(
            f"received the reduction {method} for a '{model_type}' model, whose layers have "
            f"{kinds[model_type]}; allowed: {', '.join(SELECTION_METHODS)}; use one of these"
        )


def _model_type(folder: Path) -> str | None:
    """Returns `model_type` of a folder; None for a broken one, which is refused when it is opened."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None
