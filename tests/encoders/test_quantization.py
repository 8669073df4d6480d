"""What a quantization_config says is read, or refused in one line that names what was found."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from epd.encoders.checkpoint import open_checkpoint
from epd.encoders.quantization import Quantization, read_quantization
from epd.errors import ModelError, UnsupportedModelError
from epd.stages.loading.weight_files import num_weight_bytes
from tests.models.quantized import LAYOUTS, compressed

FP8, AWQ = LAYOUTS["fp8"].config, LAYOUTS["awq"].config
CHANNELS = LAYOUTS["fp8-dynamic"].config
GPTQ, W4A16 = LAYOUTS["gptq"].config, LAYOUTS["w4a16"].config


def written(folder: Path, settings: Any, **more: Any) -> Path:
    config = {"model_type": "qwen3_vl", "quantization_config": settings, **more}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def changed(settings: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which the setting at a path, such as "config_groups.group_0.weights", is another."""
    copied = copy.deepcopy(settings)
    *parents, last = path.split(".")
    place = copied
    for parent in parents:
        place = place[parent]
    place[last] = value
    return copied


READ = [
    (FP8, Quantization("fp8", 8, (128, 128))),
    ({"quant_method": "fp8"}, Quantization("fp8", 8, (128, 128))),
    (changed(FP8, "weight_block_size", None), Quantization("fp8", 8, None)),
    (CHANNELS, Quantization("compressed-tensors", 8, None)),
    (changed(CHANNELS, "config_groups.group_0.input_activations", None),
     Quantization("compressed-tensors", 8, None, is_weight_only=True)),
    (compressed("tensor"), Quantization("compressed-tensors", 8, None)),
    (compressed("block", block_structure=[128, 128]), Quantization("compressed-tensors", 8, (128, 128))),
    (AWQ, Quantization("awq", 4, (1, 128))),
    (changed(AWQ, "group_size", 64), Quantization("awq", 4, (1, 64))),
    (GPTQ, Quantization("gptq", 4, (1, 128), has_low_zeros=True)),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32},
     Quantization("gptq", 4, (1, 32), has_low_zeros=True)),
    (changed(GPTQ, "checkpoint_format", "gptq_v2"), Quantization("gptq", 4, (1, 128))),
    (GPTQ | {"dynamic": {"-:.*visual.*": {}}}, Quantization("gptq", 4, (1, 128), has_low_zeros=True)),
    (W4A16, Quantization("compressed-tensors", 4, (1, 128), has_zeros=False)),
    (changed(W4A16, "config_groups.group_0.weights.symmetric", False),
     Quantization("compressed-tensors", 4, (1, 128))),
    (changed(W4A16, "config_groups.group_0.weights.actorder", "static"),
     Quantization("compressed-tensors", 4, (1, 128), has_zeros=False)),
    (None, None),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), READ)
def test_what_is_supported_is_read(tmp_path: Path, settings: Any, expected: Quantization | None) -> None:
    assert read_quantization(written(tmp_path, settings)) == expected
    of_text = written(tmp_path, None, text_config={"quantization_config": settings})
    assert read_quantization(of_text) == expected


_GROUP = "config_groups.group_0"
REFUSED = {
    "'gptq' with desc_act True": changed(GPTQ, "desc_act", True),
    "'gptq' with bits 8": changed(GPTQ, "bits", 8),
    "'gptq' with group_size -1": changed(GPTQ, "group_size", -1),
    "'gptq' with checkpoint_format 'marlin'": changed(GPTQ, "checkpoint_format", "marlin"),
    r"'gptq' with settings of single modules \(dynamic\)": GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
    "'compressed-tensors' with weights.strategy 'channel'": changed(
        W4A16, f"{_GROUP}.weights.strategy", "channel"
    ),
    "with weights.actorder 'group'": changed(W4A16, f"{_GROUP}.weights.actorder", "group"),
    "with weights.num_bits 8": changed(W4A16, f"{_GROUP}.weights.num_bits", 8),
    r"with config_groups.input_activations {'num_bits': 8}": changed(
        W4A16, f"{_GROUP}.input_activations", {"num_bits": 8}
    ),
    "'bitsandbytes' with a method that is not known": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "'None' with bits 4": {"bits": 4},
    "'awq' with bits 8": changed(AWQ, "bits", 8),
    "'awq' with version 'gemv'": changed(AWQ, "version", "gemv"),
    "'awq' with group_size -1": changed(AWQ, "group_size", -1),
    "'awq' with zero_point False": changed(AWQ, "zero_point", False),
    "'fp8' with activation_scheme 'static'": changed(FP8, "activation_scheme", "static"),
    "'fp8' with fmt 'e5m2'": changed(FP8, "fmt", "e5m2"),
    "'fp8' with scale_fmt 'ue8m0'": changed(FP8, "scale_fmt", "ue8m0"),
    r"'fp8' with weight_block_size \[1, 32\]": changed(FP8, "weight_block_size", [1, 32]),
    "with format 'int-quantized'": changed(CHANNELS, "format", "int-quantized"),
    "with 2 config_groups": changed(CHANNELS, "config_groups", {"group_0": {}, "group_1": {}}),
    "with 0 config_groups": changed(CHANNELS, "config_groups", None),
    "with kv_cache_scheme {'num_bits': 8}": changed(CHANNELS, "kv_cache_scheme", {"num_bits": 8}),
    "with weights.num_bits 4": changed(CHANNELS, f"{_GROUP}.weights.num_bits", 4),
    "with weights.type 'int'": changed(CHANNELS, f"{_GROUP}.weights.type", "int"),
    "with weights.strategy 'group'": changed(CHANNELS, f"{_GROUP}.weights.strategy", "group"),
    "with weights.symmetric False": changed(CHANNELS, f"{_GROUP}.weights.symmetric", False),
    "with weights.block_structure None": compressed("block"),
    "with input_activations.dynamic False": changed(CHANNELS, f"{_GROUP}.input_activations.dynamic", False),
    "with input_activations.type 'int'": changed(CHANNELS, f"{_GROUP}.input_activations.type", "int"),
    "with config_groups.output_activations {}": changed(CHANNELS, f"{_GROUP}.output_activations", {}),
}


@pytest.mark.parametrize("found", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(tmp_path: Path, found: str) -> None:
    """Wherever a model is opened, or its memory counted, before a weight is read: there is none here."""
    path = written(tmp_path, REFUSED[found])
    message = rf"received weights quantised by .*{found} \(quant.* 'qwen3_vl' model\); allowed: FP8.*AWQ"
    for opened in (open_checkpoint, lambda path: num_weight_bytes(path, None)):
        with pytest.raises(UnsupportedModelError, match=message) as refused:
            opened(path)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_of_4_bits_are_refused_and_those_in_fp8_are_read(tmp_path: Path, count: str) -> None:
    for settings in (AWQ, GPTQ, W4A16):
        path = written(tmp_path, settings, text_config={count: 128})
        with pytest.raises(UnsupportedModelError, match=r" with experts, which are supported in FP8 \("):
            read_quantization(path)
    found = read_quantization(written(tmp_path, FP8, text_config={count: 128}))
    assert found == Quantization("fp8", 8, (128, 128))


def test_a_file_that_cannot_be_read_is_a_model_error(tmp_path: Path) -> None:
    config = written(tmp_path, None) / "config.json"
    broken = json.dumps({"quantization_config": changed(CHANNELS, "config_groups", [1])})
    for text in ("[1]", "{", '{"quantization_config": [1]}', broken):
        config.write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
            read_quantization(tmp_path)
