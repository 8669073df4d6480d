"""Tiny random checkpoints, quantised into the layouts of published files, beside what they stand for.

Each is written twice: as its authors would have published it, and with the values that its matrices have when
they are dequantised, in float32, for transformers. What dequantises is transformers' own code for FP8; the
values of AWQ are known before they are packed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.encoders.tiny_gemma import GEMMA4_SMALL, build_gemma3, build_gemma4
from tests.encoders.tiny_generic import build_glm4v_moe
from tests.models.files import name_in_files
from tests.tiny_models import BUILDERS, build_qwen3_5

FP8_MAX = 448.0
SIZES = {
    "hidden_size": 512,  # two ranks have whole blocks of 128 rows of keys
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
}
_LINEAR = "_proj|in_proj_qkv|in_proj_z|per_layer_input_gate|per_layer_projection"
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


def w4a16(*, symmetric: bool) -> dict[str, Any]:
    """The configuration that llm-compressor writes for weights of 4 bits."""
    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": symmetric,
        "dynamic": False, "actorder": None,
    }  # fmt: skip
    scheme = {"weights": weights, "input_activations": None, "output_activations": None}
    return compressed("group") | {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
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
    "gptq": Layout(
        "qwen2_5_vl",
        "Qwen2.5-VL",
        {
            "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False,
            "checkpoint_format": "gptq", "lm_head": False, "true_sequential": True, "damp_percent": 0.1,
        },
        torch.float16,
    ),
    "w4a16": Layout("qwen3_vl", "Qwen3-VL", w4a16(symmetric=True), torch.bfloat16),
    "w4a16-zeros": Layout("qwen3_vl", "Qwen3-VL", w4a16(symmetric=False), torch.bfloat16),
}  # fmt: skip


_RECURRENT = {
    **SIZES,
    "num_hidden_layers": 4,  # one round of its pattern
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
# The same of a model with a recurrent state.
RECURRENT_LAYOUTS = {
    name: replace(LAYOUTS[name], family="qwen3_5", files="Qwen3-VL", sizes=_RECURRENT)
    for name in ("fp8", "fp8-dynamic", "awq")
}
_WINDOWED = SIZES | {"num_hidden_layers": 6}  # one round of their pattern
# The same of models with sliding windows, by family. Their answers have no placeholders of media, which
# transformers would take for padding when they are read again.
WINDOWED_LAYOUTS = {
    family: {
        name: replace(layout, family=family, files="Qwen3-VL", sizes=_WINDOWED | more)
        for name, layout in LAYOUTS.items()
    }
    for family, more in {
        "gemma3": {},
        "gemma4": {},
        "gemma4-small": {"num_hidden_layers": 12, "seed": 1},
    }.items()
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
# The same of models with experts in FP8: all of a layer in one tensor, one by one beside a shared one, and
# with a scale for each row.
EXPERT_LAYOUTS = {
    "fp8-packed": replace(LAYOUTS["fp8"], sizes=SIZES | _EXPERTS | {"num_key_value_heads": 32}),
    "fp8-single": replace(
        LAYOUTS["fp8"],
        family="qwen3_5",
        sizes=_RECURRENT
        | _EXPERTS
        | {"shared_expert_intermediate_size": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
    "fp8-dynamic-single": replace(LAYOUTS["fp8-dynamic"], family="glm4v_moe", files="Qwen3-VL", sizes={}),
}
_SMALL = GEMMA4_SMALL | {"hidden_size_per_layer_input": 128}
_BUILDERS: dict[str, Any] = {
    **BUILDERS,
    "qwen3_5": build_qwen3_5,
    "gemma3": build_gemma3,
    "gemma4": build_gemma4,
    "glm4v_moe": build_glm4v_moe,
    "gemma4-small": lambda folder, **sizes: build_gemma4(folder, **_SMALL | sizes),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two folders of one checkpoint. quantized: as published; plain: dequantised."""

    quantized: Path
    plain: Path


def build(name: str, folder: Path, layouts: Mapping[str, Layout] = LAYOUTS) -> Pair:
    """Writes a checkpoint in one of the layouts."""
    layout = layouts[name]
    plain = _BUILDERS[layout.family](folder / "plain", **layout.sizes)
    quantized = shutil.copytree(plain, folder / "quantized")
    theirs: dict[str, Tensor] = {}
    ours: dict[str, Tensor] = {}
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.ndim == 3 and ".experts." in tensor_name:
            packed, theirs[tensor_name] = packed_experts(name, tensor)
            ours |= {f"{tensor_name}{end}": each for end, each in packed.items()}
            continue
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
    is_linear = bool(re.search(rf"({_LINEAR})\.weight$", name))
    return is_linear and ".layers." in name and "vision_tower." not in name


def packed_experts(name: str, experts: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """All experts of a layer in one tensor, [experts, in, out], and one of their scales; and their values."""
    each = [quantized_parts(name, expert) for expert in experts]
    values, scales = (
        torch.stack([parts[part].t() for parts, _ in each]).contiguous()
        for part in ("weight", "weight_scale_inv")
    )
    return {"": values, "_scale_inv": scales}, torch.stack([stands_for for _, stands_for in each])


def quantized_parts(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that are published instead of a weight, by the ends of their names, and its values."""
    if name == "awq":
        return awq_parts(weight, 128)
    if name == "gptq":
        return gptq_parts(weight, 128)
    if name.startswith("w4a16"):
        return packed_parts(weight, 128, symmetric=name == "w4a16")
    if name in ("fp8", "fp8-packed", "fp8-single"):
        rows, columns = weight.shape
        blocks = weight.view(rows // 128, 128, columns // 128, 128)
        scales = (blocks.abs().amax((1, 3)) / FP8_MAX).bfloat16()
        values = (blocks / scales.float()[:, None, :, None]).view_as(weight)
        parts = {"weight": values, "weight_scale_inv": scales}
    else:
        largest = weight.abs().amax(1, keepdim=True) if "dynamic" in name else weight.abs().amax().view(1)
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


def gptq_parts(weight: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoGPTQ has them: zero points one too low, and the group of each column beside them."""
    values, zeros, scales, stands_for = four_bits(weight, group, least=1)
    parts = {
        "qweight": words_of(values).t().contiguous(),
        "qzeros": words_of((zeros - 1).t()),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // group).int(),
    }
    return parts, stands_for


def packed_parts(weight: Tensor, group: int, *, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    """As compressed-tensors packs them: signed values, each 8 too high to be written."""
    values, zeros, scales, stands_for = four_bits(weight, group, zero=8 if symmetric else None)
    shape = torch.tensor(weight.shape)
    parts = {"weight_packed": words_of(values), "weight_scale": scales, "weight_shape": shape}
    points = {} if symmetric else {"weight_zero_point": words_of(zeros.t()).t().contiguous()}
    return parts | points, stands_for


def four_bits(
    weight: Tensor, group: int, least: int = 0, zero: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values [N, C] and zero points [N, C / G] of 0 to 15, scales [N, C / G], and what they stand for."""
    grouped = weight.view(len(weight), -1, group)
    low, high = grouped.amin(2), grouped.amax(2)
    scales = ((high - low if zero is None else 2 * grouped.abs().amax(2)) / 15).half().float()
    zeros = (-low / scales).round().clamp(least, 15) if zero is None else torch.full_like(scales, zero)
    values = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    stands_for = ((values - zeros[..., None]) * scales[..., None]).flatten(1)
    return values.flatten(1).int(), zeros.int(), scales.half(), stands_for


def words_of(values: Tensor) -> Tensor:
    """int32 [M, N / 8] of values of 4 bits, [M, N]: the first of eight in the lowest bits."""
    words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= values[:, place::8].long() << 4 * place
    return words.where(words < 2**31, words - 2**32).int()
