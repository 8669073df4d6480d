"""Towers with fewer operations give what transformers' own forward gives, whatever the runs."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    apply_rotary_pos_emb_vision,
)

from epd.encoders.adapter import PatchRun
from epd.encoders.device import CPU
from epd.encoders.families import qwen_tower
from epd.encoders.families.qwen_tower import attend_runs, runs_by_length
from epd.encoders.plans import Grid
from epd.stages.profiling import peak_bytes
from tests.encoders.families import Family
from tests.encoders.tolerances import assert_same_but_for_batching

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NAMES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl", "glm4v", "glm_ocr")
BATCHES = [(Grid(1, 4, 4),), (Grid(3, 12, 10),), (Grid(2, 6, 14), Grid(1, 6, 14))]


def as_published(tower: Any) -> nn.Module:
    """The same weights with transformers' own forward in every module."""
    model = type(tower)(tower.config).eval()
    model.load_state_dict(tower.state_dict())
    return model


def batch_of(family: Family, grids: tuple[Grid, ...]) -> list[PatchRun]:
    spec = family.adapter.video_spec  # type: ignore[attr-defined]
    size = 3 * spec.frames_per_unit * spec.side**2
    return [PatchRun("video", torch.randn(grid.num_patches, size), grid) for grid in grids]


@pytest.mark.parametrize("grids", BATCHES, ids=["one", "frames", "two"])
@pytest.mark.parametrize("name", [*NAMES, "video_llama_3"])
def test_a_tower_gives_what_transformers_gives(
    families: dict[str, Family], name: str, grids: tuple[Grid, ...]
) -> None:
    family = families[name]
    runs = batch_of(family, grids)
    published = as_published(family.tower)
    with torch.inference_mode():
        ours = family.adapter.encode_batch(family.tower, runs)
        theirs = family.adapter.encode_batch(published, runs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_but_for_batching(one, other)


def compare_fused(device: str, dtype: torch.dtype) -> None:
    """A tower by kernels, interpreted on a CPU, against the published one, in 32 bits.

    Its gates have 20 channels, padded to 128. Windows of four patches a side leave runs of several lengths.
    """
    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(
        depth=2, hidden_size=32, intermediate_size=20, num_heads=2, out_hidden_size=24, patch_size=4,
        spatial_patch_size=4, window_size=16, fullatt_block_indexes=[1],
    )  # fmt: skip
    published = Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    tower: Any = qwen_tower.prepare_tower(as_published(published)).to(device, dtype)
    grid = torch.tensor([[2, 6, 10]])
    patches = torch.randn(int(grid.prod()), 3 * 2 * 4 * 4)
    with torch.inference_mode():
        theirs = published(patches, grid).pooler_output
        with patch.object(qwen_tower, "uses_kernels", lambda _: True):
            first, again = (tower(patches.to(device, dtype), grid.to(device)).pooler_output for _ in "12")
    assert torch.equal(first, again), "weights are padded once"
    weights = tower.blocks[0].mlp.up_proj.weight, published.blocks[0].mlp.up_proj.weight
    assert torch.equal(weights[0].cpu().float(), weights[1].to(dtype).float()), "their places are views"
    difference = (first.cpu().float() - theirs).abs().max() / theirs.abs().max()
    assert difference < TOLERANCE[dtype], difference


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU in this machine")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_tower_by_kernels_gives_what_transformers_gives(dtype: torch.dtype) -> None:
    compare_fused("cuda", dtype)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_attends_once_for_each_length_of_a_run(families: dict[str, Family], name: str) -> None:
    family = families[name]
    runs = batch_of(family, (Grid(3, 12, 10),))
    inputs = family.adapter.tower_inputs((runs[0].grid,), CPU)  # type: ignore[attr-defined]
    kinds = {key: len(set(ends.diff().tolist())) for key, ends in inputs.items() if "seqlens" in key}
    with (
        torch.inference_mode(),
        patch.object(
            qwen_tower, "scaled_dot_product_attention", wraps=qwen_tower.scaled_dot_product_attention
        ) as attention,
        patch.object(nn.functional, "conv3d", side_effect=AssertionError("patches are a matrix product")),
    ):
        family.adapter.encode_batch(family.tower, runs)
    num_layers = len(family.tower.blocks)  # type: ignore[arg-type]
    assert num_layers <= attention.call_count <= num_layers * max(kinds.values())


def test_frames_of_video_llama_are_attended_at_once(families: dict[str, Family]) -> None:
    family = families["video_llama_3"]
    runs = batch_of(family, (Grid(3, 12, 10), Grid(2, 12, 10)))
    attend = qwen_tower.scaled_dot_product_attention
    with (
        torch.inference_mode(),
        patch.object(qwen_tower, "scaled_dot_product_attention", wraps=attend) as attention,
        patch.object(nn.functional, "scaled_dot_product_attention", side_effect=AssertionError("no other")),
    ):
        family.adapter.encode_batch(family.tower, runs)
    assert attention.call_count == len(family.tower.vision_model.encoder.layers)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_place_is_that_of_transformers(dtype: torch.dtype) -> None:
    """To the last bit, in pieces the last of which is short."""
    qkv, angles = torch.randn(10, 3, 2, 8, dtype=dtype), torch.randn(10, 8)
    wanted = apply_rotary_pos_emb_vision(qkv[:, 0], qkv[:, 1], angles.cos(), angles.sin())
    value = qkv[:, 2].clone()
    with patch.object(qwen_tower, "_ROTATED_TOGETHER", 4):
        qwen_tower.rotate(qkv[:, :2], angles.cos(), angles.sin())
    assert all(torch.equal(*each) for each in zip(qkv.unbind(1), (*wanted, value), strict=True))


@pytest.mark.parametrize(("name", "most"), [("qwen2_5_vl", 0.6), ("qwen3_vl", 0.75)])
def test_a_layer_holds_less_than_transformers_own(
    families: dict[str, Family], name: str, most: float
) -> None:
    """The most live tensors of a layer in 16 bits, in pieces that are small beside its patches."""
    tower: Any = families[name].tower
    hidden = torch.randn(512, tower.config.hidden_size, dtype=torch.bfloat16)
    ends = torch.tensor([0, 512], dtype=torch.int32)
    head_size = tower.config.hidden_size // tower.config.num_heads
    turns = torch.randn(512, head_size).cos(), torch.randn(512, head_size).sin()
    held = []
    for each in (qwen_tower.prepare_tower(as_published(tower)), as_published(tower)):
        layer: Any = each.bfloat16().blocks[0]  # type: ignore[index]
        with torch.inference_mode(), patch.object(qwen_tower, "_ROTATED_TOGETHER", 64):
            held.append(peak_bytes(partial(layer, hidden, cu_seqlens=ends, position_embeddings=turns)))
    assert held[0] < most * held[1], held


@pytest.mark.parametrize("name", NAMES)
def test_a_tower_can_be_trained(families: dict[str, Family], name: str) -> None:
    """Nothing that a gradient needs is overwritten."""
    family = families[name]
    runs, tower = batch_of(family, BATCHES[2]), family.tower
    grads = []
    for each in (tower, as_published(tower)):
        each.zero_grad()
        sum(found.rows.square().sum() for found in family.adapter.encode_batch(each, runs)).backward()  # type: ignore[union-attr]
        grads.append([parameter.grad for parameter in each.parameters()])
        each.zero_grad()
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)


def test_runs_are_attended_apart_whatever_their_order() -> None:
    torch.manual_seed(0)
    ends = (0, 3, 4, 4, 7, 12, 13)
    query, key, value = torch.randn(3, 13, 2, 8)
    ours = attend_runs(query, key, value, ends, 0.3)
    for start, stop in pairwise(ends):
        for head in range(2):
            weights = (query[start:stop, head] @ key[start:stop, head].T * 0.3).softmax(1)
            torch.testing.assert_close(ours[start:stop, head], weights @ value[start:stop, head])
    assert [(length, rows.tolist()) for length, rows in runs_by_length(ends, CPU)] == [
        (1, [3, 12]),
        (3, [0, 1, 2, 4, 5, 6]),
        (5, [7, 8, 9, 10, 11]),
    ]
