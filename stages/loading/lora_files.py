"""Reads LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

A linear module with a weight W, [N, C], computes with rank r and a scale s, as in LoRA (arXiv 2106.09685):

    x W^T + s (x A^T) B^T        files    MODULE.lora_A.weight [r, C] | MODULE.lora_B.weight [N, r]

s is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (arXiv 2312.03732). What else an adapter may be
is refused by the name of its setting.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from epd.errors import ModelError, UnsupportedModelError
from epd.lora_modules import CONFIG, WEIGHTS, LoRAModule

_PREFIX = "base_model.model."
_PART = re.compile(r"^(?P<module>.+)\.lora_(?P<part>[AB])\.weight$")
# Settings of a configuration with the values that change nothing here.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}
# Ways to begin that change the weights of the base model, too.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LowRank:
    """Holds what an adapter adds to one linear module.

    a: [r, C]. b: [N, r], with the scale.
    """

    a: Tensor
    b: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        return LowRank(self.a.to(device, dtype), self.b.to(device, dtype))


def read_lora(module: LoRAModule) -> dict[str, LowRank]:
    """Returns what an adapter adds, float32, by the names that its modules had when it was trained.

    Raises ModelError for files that cannot be read or do not belong together, UnsupportedModelError for an
    adapter that is more than this.
    """
    try:
        config = json.loads((module.path / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(module.path / WEIGHTS)
        return dict(_products(module.name, config, tensors))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, re.error, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the LoRA module '{module.name}' does not load: {reason}") from error


def _products(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, LowRank]]:
    _check_plain(name, config)
    parts: dict[str, dict[str, Tensor]] = {}
    for stored, tensor in tensors.items():
        found = _PART.match(stored.removeprefix(_PREFIX))
        if found is None:
            raise unsupported(
                name, f"the tensor {stored}", "lora_A.weight and lora_B.weight of linear modules"
            )
        parts.setdefault(found["module"], {})[found["part"]] = tensor.float()
    if not parts:
        raise ValueError(f"{WEIGHTS} has no tensors; save the adapter again")
    for path, pair in parts.items():
        _check_target(path, config["target_modules"])
        yield path, _low_rank(path, config, pair)


def _check_plain(name: str, config: Mapping[str, Any]) -> None:
    for setting, allowed in _PLAIN.items():
        value = config.get(setting, allowed[0])
        if value not in allowed:
            raise unsupported(name, f"{setting} {json.dumps(value)[:80]}", json.dumps(allowed[0]))
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGED_BASE):
        raise unsupported(
            name,
            f"init_lora_weights {begun!r}, which changes the base model",
            "true, to which PEFT's save_pretrained converts it (path_initial_model_for_weight_conversion)",
        )


def unsupported(name: str, what: str, allowed: str) -> UnsupportedModelError:
    """Returns the error for an adapter that is more than products of low rank beside the language model's."""
    return UnsupportedModelError(
        f"received the LoRA module '{name}' with {what}; allowed: {allowed}; merge the adapter into its base "
        "model with PEFT's merge_and_unload, and serve that"
    )


def _check_target(path: str, targets: Any) -> None:
    """Raises ValueError for a module that PEFT would not give the adapter to: a text is a pattern of all."""
    if isinstance(targets, str):
        is_target = targets == "all-linear" or re.fullmatch(targets, path) is not None
    else:
        is_target = any(path == each or path.endswith(f".{each}") for each in targets)
    if not is_target:
        raise ValueError(
            f"{WEIGHTS} has {path}, which target_modules of {CONFIG} does not name; get both files"
        )


def _low_rank(path: str, config: Mapping[str, Any], pair: Mapping[str, Tensor]) -> LowRank:
    if pair.keys() != {"A", "B"}:
        raise ValueError(f"{path} has one of lora_A and lora_B alone; get {WEIGHTS} again")
    rank = int(_own(path, config.get("rank_pattern"), config["r"]))
    alpha = float(_own(path, config.get("alpha_pattern"), config["lora_alpha"]))
    a, b = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or not len(a) == b.shape[1] == rank:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"{path} has lora_A and lora_B of {shapes}, {CONFIG} says a rank of {rank}")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"{path} has values that are not finite; train the adapter again")
    return LowRank(a, b * (alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))


def _own(path: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """Returns the value of the first pattern that a module's name ends with, as PEFT finds it."""
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", path))
    return next(found, default)
