"""Tiny random checkpoints, quantised into the layouts of published files, beside what they stand for.

Each is written twice: as its authors would have published it, and with the values that its matrices have when
they are dequantised, in float32, for transformers. What dequantises is transformers' own code for FP8; the
values of AWQ are known before they are packed.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.models.files import name_in_files
from tests.tiny_models import BUILDERS

FP8_MAX = 448.0
SIZES = {
    "hidden_size": 512,  # two ranks have whole blocks of 128 rows of keys
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
}
# AWQ's order: the four bits i of a word, from the lowest, are those of this column of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def compressed(strategy: str, **weights: Any) -> dict[str, Any]:
    """The configuration that llm-compressor writes for FP8."""
    args = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    scheme = {"weights": args | weights, "input_activations": _ACTIVATIONS, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
        "ignore": ["lm_head", "re:.*visual.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to publish quantised weights.

    files: whose names tensors have.
    dtype: of all that is not quantised.
    has_tower: if the blocks of the vision tower are quantised, too.
    """

    family: str
    files: str
    config: dict[str, Any]
    dtype: torch.dtype
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)
    has_tower: bool = False


LAYOUTS = {
    "fp8": Layout(
        "qwen3_vl",
        "Qwen3-VL",
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.visual"],
        },
        torch.bfloat16,
    ),
    "fp8-dynamic": Layout("qwen2_5_vl", "Qwen2.5-VL", compressed("channel"), torch.bfloat16),
    "fp8-tensor": Layout(
        "qwen3_vl",
        "Qwen3-VL",
        compressed("tensor") | {"ignore": ["lm_head"]},
        torch.bfloat16,
        has_tower=True,
    ),
    "awq": Layout(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        {
            "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": ["visual"],
        },
        torch.float16,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """Two folders of one checkpoint. quantized: as published; plain: dequantised."""

    quantized: Path
    plain: Path


def build(name: str, folder: Path) -> Pair:
    """Writes a checkpoint in one of LAYOUTS."""
    layout = LAYOUTS[name]
    plain = BUILDERS[layout.family](folder / "plain", **layout.sizes)
    quantized = shutil.copytree(plain, folder / "quantized")
    theirs: dict[str, Tensor] = {}
    ours: dict[str, Tensor] = {}
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        if is_quantized(tensor_name, layout):
            parts, theirs[tensor_name] = quantized_parts(name, tensor)
        else:
            stored = tensor.to(layout.dtype)
            parts, theirs[tensor_name] = {tensor_name.rpartition(".")[2]: stored}, stored.float()
        module = tensor_name.rpartition(".")[0]
        for part, values in parts.items():
            ours[name_in_files(layout.files, f"{module}.{part}")] = values
    save_file(theirs, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(ours, quantized / "model.safetensors", metadata={"format": "pt"})
    edit_config(quantized, quantization_config=layout.config)
    return Pair(quantized, plain)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def is_quantized(name: str, layout: Layout) -> bool:
    """The linear modules of the decoder's layers are; the head, norms and biases are not."""
    if ".visual.blocks." in name:
        return layout.has_tower and bool(re.search(r"\.(qkv|proj|linear_fc[12])\.weight$", name))
    return ".layers." in name and name.endswith("_proj.weight")


def quantized_parts(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that are published instead of a weight, by the ends of their names, and its values."""
    if name == "awq":
        return awq_parts(weight, 128)
    if name == "fp8":
        rows, columns = weight.shape
        blocks = weight.view(rows // 128, 128, columns // 128, 128)
        scales = (blocks.abs().amax((1, 3)) / FP8_MAX).bfloat16()
        values = (blocks / scales.float()[:, None, :, None]).view_as(weight)
        parts = {"weight": values, "weight_scale_inv": scales}
    else:
        largest = weight.abs().amax(1, keepdim=True) if name == "fp8-dynamic" else weight.abs().amax().view(1)
        scales = (largest / FP8_MAX).bfloat16()
        parts = {"weight": weight / scales.float(), "weight_scale": scales}
    parts["weight"] = parts["weight"].clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return parts, Fp8Dequantize(None)._dequantize_one(parts["weight"], scales, torch.float32)


def awq_parts(weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoAWQ has them: the matrix the other way round, and eight columns of that in a word."""
    columns = weight.t().view(-1, group, len(weight))  # [groups, group, out]
    low, high = columns.amin(1), columns.amax(1)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15).int()
    values = (columns / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15).int()
    stands_for = (values - zeros[:, None]) * scales.float()[:, None]
    parts = {"qweight": awq_words(values.flatten(0, 1)), "qzeros": awq_words(zeros), "scales": scales}
    return parts, stands_for.flatten(0, 1).t().contiguous()


def awq_words(values: Tensor) -> Tensor:
    """int32 [M, N / 8] of values of 4 bits, int32 [M, N]."""
    words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, column in enumerate(AWQ_ORDER):
            words[:, word] |= values[:, 8 * word + column].long() << 4 * place
    return words.where(words < 2**31, words - 2**32).int()
