"""Cuts a language model to the part of one rank, before its weights are read.

Heads are cut with the keys and values that they read, channels of the MLP and of each expert as evenly as
possible, and so is the vocabulary. Norms and routers are everywhere. What is left is a model of transformers
with smaller matrices, whose configuration counts the heads that are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from epd.errors import UnsupportedModelError
from epd.stages.attention.support import RECURRENT, WINDOWED
from epd.stages.decoder.text_model import text_model
from epd.stages.loading.merged_weights import GATE_UP, QKV
from epd.stages.loading.quantized_linear import QuantizedLinear
from epd.stages.loading.weight_files import TensorPart
from epd.stages.rank import Rank
from epd.types import ceil_div


def cut_model(model: Any, rank: Rank) -> dict[str, TensorPart]:
    """Cuts the language model of a skeleton, and returns the part of each tensor that it still has room for.

    Raises UnsupportedModelError for a model that cannot be shared by so many ranks.
    """
    decoder = model.get_decoder()
    check_divisible(model, rank.size)
    head_dim = decoder.layers[0].self_attn.head_dim
    parts = dict(_parts(model, rank))
    for name, part in parts.items():
        _shrink(model, name, part)
    decoder.config.head_dim = head_dim
    decoder.config.num_attention_heads //= rank.size
    decoder.config.num_key_value_heads //= rank.size
    return parts


def check_divisible(model: Any, size: int) -> None:
    """Raises UnsupportedModelError for a model that cannot be shared by so many ranks."""
    config = model.get_decoder().config
    received = f"received a tensor parallel size of {size} for the language model '{config.model_type}'"
    if text_model(model.get_decoder()) is None:
        raise UnsupportedModelError(
            f"{received}, which only transformers' own modules compute; allowed: 1; use a larger GPU"
        )
    if config.model_type in RECURRENT:
        raise UnsupportedModelError(f"{received}, which has a recurrent state; allowed: 1; use a larger GPU")
    if config.model_type in WINDOWED:
        raise UnsupportedModelError(f"{received}, which has sliding windows; allowed: 1; use a larger GPU")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    fitting = [str(each) for each in range(1, kv_heads + 1) if not heads % each and not kv_heads % each]
    if str(size) not in fitting:
        raise UnsupportedModelError(
            f"{received}, which has {heads} heads and {kv_heads} of keys and values; allowed: "
            f"{', '.join(fitting)}; set one of these"
        )


def _parts(model: Any, rank: Rank) -> Iterator[tuple[str, TensorPart]]:
    names = {module: name for name, module in model.named_modules()}
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        for module in (getattr(attention, each) for each in QKV):
            yield from _rows(names[module], module, rank, rank.part(module.out_features))
        output = attention.o_proj
        yield from _columns(names[output], output, rank, rank.part(output.in_features))
        if hasattr(mlp, "experts"):
            yield from _experts(names[mlp.experts], mlp.experts, rank)
            continue
        gate_up = [getattr(mlp, each) for each in GATE_UP]
        channels = _channels(gate_up, mlp.down_proj, rank)
        for module in gate_up:
            yield from _rows(names[module], module, rank, channels)
        yield from _columns(names[mlp.down_proj], mlp.down_proj, rank, channels)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        yield from _rows(names[module], module, rank, rank.part(_num_rows(module)))


def _channels(gate_up: Sequence[Any], down: Any, rank: Rank) -> tuple[int, int]:
    """Returns a rank's channels of an MLP, whole groups of what shares a scale in one of its matrices."""
    unit = max(_units(down)[1], *(_units(each)[0] for each in gate_up))
    start, stop = rank.part(ceil_div(down.in_features, unit))
    return unit * start, min(unit * stop, down.in_features)


def _units(module: Any) -> tuple[int, int]:
    return module.units if isinstance(module, QuantizedLinear) else (1, 1)


def _unit_of(module: Any, part: str) -> tuple[int, int]:
    return module.unit_of(part) if isinstance(module, QuantizedLinear) else (1, 1)


def _num_rows(module: Any) -> int:
    return int(module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features)


def _rows(name: str, module: Any, rank: Rank, part: tuple[int, int]) -> Iterator[tuple[str, TensorPart]]:
    """Cuts out rows of a matrix, and what goes with them."""
    _check_units(name, "rows", rank, part, _num_rows(module), _units(module)[0])
    start, stop = part
    for kind, _ in module.named_parameters(recurse=False):
        unit, _ = _unit_of(module, kind)
        yield f"{name}.{kind}", TensorPart(0, start // unit, ceil_div(stop, unit))


def _columns(name: str, module: Any, rank: Rank, part: tuple[int, int]) -> Iterator[tuple[str, TensorPart]]:
    """Cuts out columns of a matrix; each rank has the whole bias."""
    _check_units(name, "columns", rank, part, module.in_features, _units(module)[1])
    start, stop = part
    for kind, _ in module.named_parameters(recurse=False):
        if kind != "bias":
            _, unit = _unit_of(module, kind)
            yield f"{name}.{kind}", TensorPart(1, start // unit, ceil_div(stop, unit))


def _experts(name: str, experts: Any, rank: Rank) -> Iterator[tuple[str, TensorPart]]:
    """Cuts out channels of every expert: the ranks have equal work, whatever the tokens are."""
    gate_up, down = (tuple(each.shape) for each in (experts.gate_up_proj, experts.down_proj))
    start, stop = rank.part(down[2])
    yield f"{name}.gate_up_proj", TensorPart(1, start, stop, num_pieces=2, whole=gate_up)
    yield f"{name}.down_proj", TensorPart(2, start, stop, whole=down)


def _check_units(name: str, what: str, rank: Rank, part: tuple[int, int], count: int, unit: int) -> None:
    """Raises UnsupportedModelError if one of `count` rows or columns beside the cut shares a scale."""
    if any(each % unit and each != count for each in part):
        raise UnsupportedModelError(
            f"received a tensor parallel size of {rank.size} for {name}, of whose {count} {what} each {unit} "
            "share a scale; allowed: sizes that leave these together; set a smaller one"
        )


def _shrink(model: nn.Module, name: str, part: TensorPart) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    place: Any = getattr(module, attribute)
    smaller = torch.empty(part.shape_of(place.shape), dtype=place.dtype, device="meta")
    module.register_parameter(attribute, nn.Parameter(smaller, requires_grad=False))
