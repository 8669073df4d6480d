"""Cuts a language model to the part of one rank, before its weights are read.

Heads are cut with the keys and values that they read, channels of the MLP as evenly as possible, and so is
the vocabulary. What is left is a model of transformers with smaller matrices, whose configuration counts the
heads that are here. Norms are everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from epd.errors import UnsupportedModelError
from epd.stages.attention.support import RECURRENT, WINDOWED
from epd.stages.decoder.text_model import text_model
from epd.stages.loading.merged_weights import GATE_UP, QKV
from epd.stages.loading.weight_files import TensorPart
from epd.stages.rank import Rank


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
    if any(hasattr(layer.mlp, "experts") for layer in model.get_decoder().layers):
        raise UnsupportedModelError(f"{received}, which has experts; allowed: 1; use a larger GPU")
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
        for module in (
            *(getattr(attention, each) for each in QKV),
            *(getattr(mlp, each) for each in GATE_UP),
        ):
            yield from _rows(names[module], module, rank)
        for module in (attention.o_proj, mlp.down_proj):
            yield f"{names[module]}.weight", TensorPart(1, *rank.part(module.weight.shape[1]))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        yield from _rows(names[module], module, rank)


def _rows(name: str, module: nn.Module, rank: Rank) -> Iterator[tuple[str, TensorPart]]:
    for kind, parameter in module.named_parameters(recurse=False):
        yield f"{name}.{kind}", TensorPart(0, *rank.part(len(parameter)))


def _shrink(model: nn.Module, name: str, part: TensorPart) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    place: Any = getattr(module, attribute)
    smaller = torch.empty(part.shape_of(place.shape), dtype=place.dtype, device="meta")
    module.register_parameter(attribute, nn.Parameter(smaller, requires_grad=False))
