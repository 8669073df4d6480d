"""LoRA adapters drawn for a tiny checkpoint, in PEFT's files, and the checkpoint with each merged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Two folders. adapter: as PEFT saves it. merged: the base model with the adapter's products added."""

    adapter: Path
    merged: Path


def peft_config(targets: Sequence[str] | str, rank: int, alpha: float, **more: Any) -> dict[str, Any]:
    """What PEFT writes, as far as it says anything about the weights."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "bias": "none",
        "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True, "modules_to_save": None,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.05, "target_modules": targets, "use_dora": False,
        "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
    } | more  # fmt: skip


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def draw(base: Path, folder: Path, seed: int, targets: Sequence[str] = ALL, **config: Any) -> Drawn:
    """Draws an adapter of the language model's matrices, and merges it: W + s B A, s as published.

    config: rank, alpha, and more of PEFT's settings; strength: a factor of what is drawn
    """
    rank, alpha, strength = config.pop("rank", 4), config.pop("alpha", 8), config.pop("strength", 1.0)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    weights = {name: each for file in base.glob("*.safetensors") for name, each in load_file(file).items()}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        is_other = (
            kind != "weight"
            or ".layers." not in name
            or name.startswith("mtp.")
            or any(part in name for part in (".experts.", "vision_tower."))
        )
        if is_other or module.rpartition(".")[2] not in targets:
            continue
        a = torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(len(weight), rank, generator=generator) * weight.std() * strength
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        weights[name] = weight + (scale * (b.double() @ a.double())).to(weight.dtype)
        start = f"base_model.model.{module}"
        tensors |= {f"{start}.lora_A.weight": a, f"{start}.lora_B.weight": b}
    merged = shutil.copytree(base, folder / f"merged-{seed}")
    for shard in merged.glob("*.safetensors*"):
        shard.unlink()
    save_file(weights, merged / _WEIGHTS, metadata={"format": "pt"})
    stated = peft_config(list(targets), rank, alpha, **config)
    return Drawn(write_adapter(folder / f"adapter-{seed}", stated, tensors), merged)


def renamed(drawn: Path, folder: Path, pattern: str, replacement: str) -> Path:
    """Copies an adapter with other names of its modules, as another release of transformers has them."""
    tensors = load_file(drawn / "adapter_model.safetensors")
    config = json.loads((drawn / "adapter_config.json").read_text(encoding="utf-8"))
    return write_adapter(
        folder, config, {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    )
