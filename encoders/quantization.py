"""Reads how the weights of a checkpoint are quantised, and refuses what nothing here computes.

Which matrices are, the headers of the weight files say; lists of modules that are not quantised are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from epd.errors import ModelError, UnsupportedModelError

# Rows and columns of a matrix that share a scale, where blocks of FP8 values do.
FP8_BLOCK = (128, 128)
_GROUPS = (32, 64, 128)
# Fields of a configuration that count experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SUPPORTED = (
    "FP8 (e4m3) with a scale for each block of 128 x 128, row or matrix, activations not quantised or "
    "dynamically (quant_method fp8; compressed-tensors in the format float-quantized), AWQ of 4 bits with "
    "zero points, in the gemm layout, GPTQ of 4 bits without desc_act, compressed-tensors of 4 bits in the "
    "format pack-quantized, each in groups of 32, 64 or 128"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Describes the quantised matrices of a checkpoint.

    method: as the configuration names it.
    bits: of a value, 8 for FP8.
    block: rows and columns of a matrix that share a scale; None if each row has one, or all rows the same.
    has_zeros: whether groups of 4 bits have zero points in the files.
    has_low_zeros: whether these lie one step too low, as GPTQ first wrote them.
    is_weight_only: whether rows are not to be quantised, too.
    """

    method: str
    bits: Literal[4, 8]
    block: tuple[int, int] | None
    has_zeros: bool = True
    has_low_zeros: bool = False
    is_weight_only: bool = False


def read_quantization(path: Path) -> Quantization | None:
    """Reads the configuration of the model at `path`; None without one, or if nothing is quantised.

    Raises UnsupportedModelError for what is not supported, ModelError for a file that cannot be read.
    """
    file = path / "config.json"
    if not file.is_file():  # who loads the model reports it
        return None
    try:
        return _read(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"cannot read '{file}': {' '.join(str(error).split())}") from error


def check_plain(quantization: Quantization | None) -> None:
    """Raises UnsupportedModelError for a checkpoint that cannot be quantised, since it is already."""
    if quantization is not None:
        raise UnsupportedModelError(
            f"received the quantization fp8 for weights quantised by '{quantization.method}'; allowed: those "
            "in bfloat16, float16 and float32; leave it out"
        )


def _read(config: Mapping[str, Any]) -> Quantization | None:
    text = config.get("text_config") or {}
    settings = config.get("quantization_config") or text.get("quantization_config")
    if not settings:
        return None
    found = _Found(settings, str(settings.get("quant_method")), str(config.get("model_type")))
    quantization = _quantization(found)
    if quantization.bits == 4 and any(config.get(name) or text.get(name) for name in _EXPERTS):
        raise found.unsupported("experts, which are supported in FP8")
    return quantization


@dataclass(frozen=True, slots=True)
class _Found:
    """Holds settings of a quantization_config. prefix: of their names in messages."""

    settings: Mapping[str, Any]
    method: str
    model_type: str
    prefix: str = ""

    def expect(self, name: str, *allowed: Any, default: Any = None) -> Any:
        """Returns a setting. Raises UnsupportedModelError for any value that is not allowed."""
        value = self.settings.get(name, default)
        if not any(value == each and type(value) is type(each) for each in allowed):
            raise self.unsupported(f"{self.prefix}{name} {value!r}")
        return value

    def within(self, settings: Mapping[str, Any], name: str) -> _Found:
        return _Found(settings, self.method, self.model_type, f"{name}.")

    def unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"received weights quantised by '{self.method}' with {what} (quantization_config of a "
            f"'{self.model_type}' model); allowed: {SUPPORTED}, or bfloat16, float16 and float32; use one of "
            "these checkpoints"
        )


def _quantization(found: _Found) -> Quantization:
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
    if found.method not in readers:
        bits = found.settings.get("bits")
        raise found.unsupported("a method that is not known" if bits is None else f"bits {bits!r}")
    return readers[found.method](found)


def _awq(found: _Found) -> Quantization:
    found.expect("bits", 4)
    found.expect("version", "gemm", "GEMM", default=found.settings.get("format", "gemm"))
    found.expect("zero_point", True, default=True)
    return Quantization(found.method, 4, (1, found.expect("group_size", *_GROUPS)))


def _gptq(found: _Found) -> Quantization:
    found.expect("bits", 4)
    found.expect("desc_act", False, default=False)
    layout = found.expect("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    group = (1, found.expect("group_size", *_GROUPS))
    if any(not name.startswith("-:") for name in found.settings.get("dynamic") or {}):
        raise found.unsupported("settings of single modules (dynamic)")
    return Quantization(found.method, 4, group, has_low_zeros=layout == "gptq")


def _fp8(found: _Found) -> Quantization:
    found.expect("activation_scheme", "dynamic", default="dynamic")
    found.expect("fmt", "e4m3", default="e4m3")
    found.expect("scale_fmt", "float", default="float")
    block = found.expect("weight_block_size", list(FP8_BLOCK), None, default=list(FP8_BLOCK))
    return Quantization(found.method, 8, FP8_BLOCK if block else None)


def _compressed(found: _Found) -> Quantization:
    groups = found.settings.get("config_groups") or {}
    if len(groups) != 1:
        raise found.unsupported(f"{len(groups)} config_groups")
    is_packed = found.expect("format", "float-quantized", "pack-quantized") == "pack-quantized"
    found.expect("kv_cache_scheme", None)
    (scheme,) = groups.values()
    if is_packed:
        return _packed(found.within(scheme, "config_groups"))
    found.within(scheme, "config_groups").expect("output_activations", None)
    if activations := scheme.get("input_activations"):
        inputs = found.within(activations, "input_activations")
        inputs.expect("type", "float")
        inputs.expect("num_bits", 8)
        inputs.expect("dynamic", True)
    weights = found.within(scheme.get("weights") or {}, "weights")
    weights.expect("type", "float")
    weights.expect("num_bits", 8)
    weights.expect("symmetric", True, default=True)
    has_blocks = weights.expect("strategy", "tensor", "channel", "block") == "block"
    if has_blocks:
        weights.expect("block_structure", list(FP8_BLOCK))
    return Quantization(found.method, 8, FP8_BLOCK if has_blocks else None, is_weight_only=not activations)


def _packed(found: _Found) -> Quantization:
    """Reads a scheme of weights of 4 bits whose activations are not quantised (w4a16)."""
    found.expect("input_activations", None)
    found.expect("output_activations", None)
    weights = found.within(found.settings.get("weights") or {}, "weights")
    weights.expect("type", "int")
    weights.expect("num_bits", 4)
    weights.expect("strategy", "group")
    weights.expect("actorder", None, False, "static", "weight")
    group = (1, weights.expect("group_size", *_GROUPS))
    is_symmetric = weights.expect("symmetric", True, False, default=True)
    return Quantization(found.method, 4, group, has_zeros=not is_symmetric)
