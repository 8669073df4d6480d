"""Cuts a language model to the part of one rank, before its weights are read.

Heads are cut with the keys and values that they read, or with their recurrent states. Channels of the MLP and
of each expert are cut as evenly as possible, and so is the vocabulary. Norms and routers are everywhere. What
is left is a model of transformers with smaller matrices, whose configuration counts the heads that are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from epd.encoders.names import EXPERT_SCALES
from epd.errors import UnsupportedModelError
from epd.stages.attention.support import MIXED_HEADS, RECURRENT, adds_embeddings
from epd.stages.decoder.text_model import text_model
from epd.stages.loading.merged_weights import GATE_UP, QKV
from epd.stages.loading.quantized_experts import QuantizedExperts
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
    parts = dict(_parts(model, rank))
    for name, part in parts.items():
        _shrink(model, name, part)
    _count_heads(decoder, rank.size)
    return parts


def _count_heads(decoder: Any, size: int) -> None:
    """Lets the configuration count the heads that one of `size` ranks has."""
    config = decoder.config
    config.num_attention_heads //= size
    if config.model_type not in MIXED_HEADS:  # which count queries for each of keys
        config.head_dim = next(
            each.self_attn.head_dim for each in decoder.layers if hasattr(each, "self_attn")
        )
        config.num_key_value_heads //= size
    if config.model_type in RECURRENT:
        config.linear_num_key_heads //= size
        config.linear_num_value_heads //= size


def check_divisible(model: Any, size: int) -> None:
    """Raises UnsupportedModelError for a model that cannot be shared by so many ranks."""
    decoder = model.get_decoder()
    config, known = decoder.config, text_model(decoder)
    received = f"received a tensor parallel size of {size} for the language model '{config.model_type}'"
    if adds_embeddings(config):
        raise UnsupportedModelError(
            f"{received}, whose files have matrices merged, which are not cut; allowed: 1; use a larger GPU"
        )
    if known is None:
        raise UnsupportedModelError(
            f"{received}, which only transformers' own modules compute; allowed: 1; use a larger GPU"
        )
    kv_heads = sorted({each.num_kv_heads for each in (known, known.local) if each is not None})
    counts = [config.num_attention_heads, *kv_heads]
    if config.model_type in RECURRENT:  # each head of keys there serves as many of values as any other
        counts.append(config.linear_num_key_heads)
    fitting = [str(each) for each in range(1, kv_heads[0] + 1) if not any(count % each for count in counts)]
    if str(size) not in fitting:
        raise UnsupportedModelError(
            f"{received}, which has {counts[0]} heads and {' or '.join(map(str, kv_heads))} of keys and "
            f"values; allowed: {', '.join(fitting)}; set one of these"
        )


def _parts(model: Any, rank: Rank) -> Iterator[tuple[str, TensorPart]]:
    names, decoder = {module: name for name, module in model.named_modules()}, model.get_decoder()
    for layer in decoder.layers:
        for module, part in matrices_of(layer, rank):
            yield from _of_matrix(names[module], module, part, rank)
        if hasattr(layer, "linear_attn"):
            yield from _beside_matrices(names[layer.linear_attn], layer.linear_attn, rank)
        for module in (layer.mlp, layer):  # Gemma 4 has experts beside the MLP
            if hasattr(module, "experts"):
                yield from _experts(names[module.experts], module.experts, rank)
    vocabularies = [model.get_input_embeddings(), model.get_output_embeddings()]
    vocabularies += [decoder.embed_tokens_per_layer] if hasattr(decoder, "embed_tokens_per_layer") else []
    for module in vocabularies:
        yield from _of_matrix(names[module], module, TensorPart(0, (rank.part(_num_rows(module)),)), rank)


def matrices_of(layer: Any, rank: Rank) -> Iterator[tuple[Any, TensorPart]]:
    """Yields linear modules of a layer, cut or not, each with the rows or columns of its matrix at a rank."""
    mlp = layer.mlp
    if hasattr(layer, "linear_attn"):
        yield from _delta(layer.linear_attn, rank)
    else:
        yield from _attention(layer.self_attn, rank)
    for dense in (mlp, getattr(mlp, "shared_expert", None), getattr(mlp, "shared_experts", None)):
        if hasattr(dense, "down_proj"):
            yield from _mlp(dense, rank)


def _attention(attention: Any, rank: Rank) -> Iterator[tuple[Any, TensorPart]]:
    for module in (getattr(attention, each, None) for each in QKV):
        if module is not None:
            yield module, TensorPart(0, (rank.part(module.out_features),))
    yield attention.o_proj, TensorPart(1, (rank.part(attention.o_proj.in_features),))


def _delta(delta: Any, rank: Rank) -> Iterator[tuple[Any, TensorPart]]:
    yield delta.in_proj_qkv, TensorPart(0, _convolved(delta, rank))
    for module in (delta.in_proj_z, delta.in_proj_b, delta.in_proj_a):
        yield module, TensorPart(0, (rank.part(module.out_features),))
    yield delta.out_proj, TensorPart(1, (rank.part(delta.value_dim),))


def _convolved(delta: Any, rank: Rank) -> tuple[tuple[int, int], ...]:
    """Returns a rank's channels of queries, keys and values, which a gated delta layer convolves as one."""
    keys, values = rank.part(delta.key_dim), rank.part(delta.value_dim)
    starts = (0, keys), (delta.key_dim, keys), (2 * delta.key_dim, values)
    return tuple((at + start, at + stop) for at, (start, stop) in starts)


def _beside_matrices(name: str, delta: Any, rank: Rank) -> Iterator[tuple[str, TensorPart]]:
    yield f"{name}.conv1d.weight", TensorPart(0, _convolved(delta, rank))
    for kind in ("A_log", "dt_bias"):
        yield f"{name}.{kind}", TensorPart(0, (rank.part(delta.num_v_heads),))


def _mlp(mlp: Any, rank: Rank) -> Iterator[tuple[Any, TensorPart]]:
    is_one = hasattr(mlp, "gate_up_proj")
    gate_up = [getattr(mlp, each) for each in (["gate_up_proj"] if is_one else GATE_UP)]
    start, stop = _channels(gate_up, mlp.down_proj, rank)
    of_each = [(at + start, at + stop) for at in ((0, mlp.down_proj.in_features) if is_one else (0,))]
    for module in gate_up:
        yield module, TensorPart(0, tuple(of_each))
    yield mlp.down_proj, TensorPart(1, ((start, stop),))


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


def _of_matrix(name: str, module: Any, part: TensorPart, rank: Rank) -> Iterator[tuple[str, TensorPart]]:
    """Cuts out rows of a matrix and what goes with them, or columns, beside which the whole bias stays."""
    is_columns = part.dim == 1
    count = module.in_features if is_columns else _num_rows(module)
    _check_units(name, part, rank, count, _units(module)[part.dim])
    for kind, _ in module.named_parameters(recurse=False):
        if not (is_columns and kind == "bias"):
            unit = _unit_of(module, kind)[part.dim]
            ranges = tuple((start // unit, ceil_div(stop, unit)) for start, stop in part.ranges)
            yield f"{name}.{kind}", TensorPart(part.dim, ranges)


def _experts(name: str, experts: Any, rank: Rank) -> Iterator[tuple[str, TensorPart]]:
    """Cuts out channels of every expert: the ranks have equal work, whatever the tokens are."""
    width = experts.down_proj.shape[2]
    unit = experts.block[0] if isinstance(experts, QuantizedExperts) and experts.block else 1
    start, stop = (unit * each for each in rank.part(width // unit))
    if start == stop:
        raise UnsupportedModelError(
            f"received a tensor parallel size of {rank.size} for {name}, of whose {width} channels {unit} "
            f"cannot be parted; allowed: at most {width // unit}; set a smaller one"
        )
    ranges = {1: ((start, stop), (width + start, width + stop)), 2: ((start, stop),)}
    for kind, tensor in experts.named_parameters():
        dim, over = 2 if kind.startswith("down") else 1, unit if kind.endswith(EXPERT_SCALES) else 1
        if tensor.shape[dim] > 1:  # else it is a scale of whole rows
            part = tuple((first // over, last // over) for first, last in ranges[dim])
            yield f"{name}.{kind}", TensorPart(dim, part, whole=tuple(tensor.shape))


def _check_units(name: str, part: TensorPart, rank: Rank, count: int, unit: int) -> None:
    """Raises UnsupportedModelError if one of `count` rows or columns beside the cut shares a scale."""
    if any(each % unit and each != count for ends in part.ranges for each in ends):
        what = ("rows", "columns")[part.dim]
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
