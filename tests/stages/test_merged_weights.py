"""Matrices that are multiplied together are one piece of memory, however they were loaded, and no other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epd.stages.decoder.layers import layers_of
from epd.stages.loading.host_weights import HostWeights
from epd.stages.loading.merged_weights import (
    DELTA,
    GATE_UP,
    QKV,
    MergedMemory,
    in_merged_order,
    merged,
    merged_part,
)
from epd.stages.loading.weight_files import write_weights
from epd.stages.loading.weights import WholeModel, load_role
from epd.stages.placement import CPU_FLOAT32
from tests.encoders.conftest import families, family
from tests.encoders.families import Family
from tests.stages.decoder.text_models import model_of

__all__ = ["families", "family"]


def groups_of(model: Any) -> list[list[Tensor]]:
    return [
        [getattr(module, name).weight for name in names]
        for layer in model.get_decoder().layers
        for module, names in (mixer_of(layer), (layer.mlp, GATE_UP))
    ]


def mixer_of(layer: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """What a layer begins with: attention, or a recurrent state."""
    return (layer.self_attn, QKV) if hasattr(layer, "self_attn") else (layer.linear_attn, DELTA)


def are_side_by_side(model: Any) -> bool:
    return all(
        one.data_ptr() + one.nbytes == other.data_ptr()
        for parts in groups_of(model)
        for one, other in pairwise(parts)
    )


@pytest.mark.parametrize("way", ["read", "mapped", "kept"])
def test_weights_are_loaded_where_they_are_merged(family: Family, tmp_path: Path, way: str) -> None:
    """So that building a decoder copies nothing, and workers go on sharing what is mapped."""
    weights = tmp_path / "weights"
    if way != "read":
        write_weights(family.path, torch.float32, weights)
    if way == "mapped":
        model: Any = WholeModel(family.path, CPU_FLOAT32, weights).part("language")
    else:
        kept = HostWeights(weights, CPU_FLOAT32.device) if way == "kept" else None
        model = load_role(family.path, "language", CPU_FLOAT32, kept).model
    assert are_side_by_side(model)
    before = [part.data_ptr() for parts in groups_of(model) for part in parts]
    layers_of(model.get_decoder())
    assert [part.data_ptr() for parts in groups_of(model) for part in parts] == before


def test_what_lies_apart_is_merged_and_stays_in_the_modules() -> None:
    model = model_of("qwen2")
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    assert not are_side_by_side(model)
    layers = layers_of(model.get_decoder())
    assert are_side_by_side(model)
    assert layers_of(model.get_decoder()) is layers, "merged once, for all engines"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_an_encoder_has_no_matrix_of_the_language_model(family: Family) -> None:
    model = load_role(family.path, "encode", CPU_FLOAT32).model
    assert not [name for name, _ in model.named_parameters() if "language_model" in name]


def test_parts_that_follow_each_other_are_not_copied() -> None:
    whole = torch.arange(20.0).view(10, 2)
    modules = [nn.Linear(2, rows, bias=False) for rows in (3, 5, 2)]
    for module, piece in zip(modules, torch.split(whole, [3, 5, 2]), strict=True):
        module.weight = nn.Parameter(piece, requires_grad=False)
    found = merged(modules, "weight")
    assert found is not None
    assert found.data_ptr() == whole.data_ptr()
    assert torch.equal(found, whole)
    assert merged(modules, "bias") is None
    turned = merged(modules[::-1], "weight")
    assert turned is not None
    assert torch.equal(turned, torch.cat(torch.split(whole, [3, 5, 2])[::-1]))


def test_modules_of_which_one_has_a_bias_are_refused() -> None:
    with pytest.raises(ValueError, match="of 2 modules that are merged only some have a bias"):
        merged([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], "bias")


def test_names_of_parts_are_read() -> None:
    part = merged_part("model.layers.3.self_attn.k_proj.bias")
    assert part is not None
    assert part.index == 1
    assert part.names[2] == "model.layers.3.self_attn.v_proj.bias"
    assert merged_part("model.layers.3.self_attn.o_proj.weight") is None
    assert merged_part("model.layers.3.mlp.experts.0.gate_proj.weight") is None
    names = ["layers.0.mlp.up_proj.weight", "norm", "layers.0.mlp.gate_proj.weight", "layers.0.mlp.down"]
    assert in_merged_order(names) == [names[2], names[0], names[1], names[3]]


def test_a_tensor_that_does_not_fit_is_left_to_who_checks_it() -> None:
    names = [f"layers.0.self_attn.{name}.weight" for name in QKV]
    memory = MergedMemory({name: torch.empty(2, 4, device="meta") for name in names})
    right, wrong = torch.ones(2, 4), torch.ones(3, 4)
    assert torch.equal(memory.place(names[1], right), right)
    assert memory.place(names[1], right).data_ptr() != right.data_ptr()
    assert memory.place(names[0], wrong) is wrong
    assert memory.place("layers.0.input_layernorm.weight", right) is right
