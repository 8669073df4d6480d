"""Merging inside of the tower equals transformers' own layers, called one by one on fewer rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.vision_utils import get_vision_position_ids

from benchmarks.reduction.reduction_costs import counted_flops
from epd.encoders.adapter import Embeddings, PatchRun
from epd.encoders.device import CPU
from epd.encoders.families.tiles import check_last_layer
from epd.encoders.groups import FrameEncoder
from epd.encoders.plans import Grid
from epd.encoders.reduction.merging import MergedNeighbours
from epd.encoders.reduction.tower_merging import Blocks, TileMerger, merge_cells
from epd.errors import RequestError, UnsupportedModelError
from epd.reduction import TowerMerge, tower_merge
from tests.encoders.families import Family
from tests.encoders.test_qwen_tower import NAMES, as_published, batch_of
from tests.encoders.tolerances import assert_same_but_for_batching
from tests.stages.encode.workers import SAMPLING, clip_of, noise

SHARES = (0.5, 0.25)
MERGE_LAYER = 1


def merged_plainly(cells: Tensor, height: int, width: int, num_kept: int) -> tuple[list[int], Tensor]:
    """The cells [S, C] of one unit that are kept, and the one that each cell has become: int64 [S]."""
    method = MergedNeighbours(height, width)
    kept = method.choose(cells[None], num_kept).tolist()
    return kept, torch.tensor([kept.index(owner) for owner in method._owners.tolist()])


def averages(cells: Tensor, there: Tensor) -> Tensor:
    return torch.stack([cells[there == each].mean(0) for each in range(int(there.max()) + 1)])


@contextmanager
def tiles_plainly(family: Family, num_kept: int) -> Iterator[None]:
    """The encoder of a tile family's tower as a loop over its layers, tile by tile."""
    tower: Any = family.tower
    vision = tower.vision_model if family.name == "smolvlm" else tower.vision_tower
    layers = vision.encoder.layer if family.name == "internvl" else vision.encoder.layers
    side = family.adapter.patches_per_side  # type: ignore[attr-defined]

    def one(hidden: Tensor) -> Tensor:  # [1, rows before + S, C]
        for layer in layers[:MERGE_LAYER]:
            hidden = layer(hidden, None) if family.name != "internvl" else layer(hidden)
        before, cells = hidden[0, : -(side**2)], hidden[0, -(side**2) :]
        _, there = merged_plainly(cells, side, side, num_kept)
        hidden = torch.cat([before, averages(cells, there)])[None]
        for layer in layers[MERGE_LAYER:]:
            hidden = layer(hidden, None) if family.name != "internvl" else layer(hidden)
        return torch.cat([hidden[0, : len(before)], hidden[0, len(before) :][there]])[None]

    def forward(*args: Tensor, inputs_embeds: Tensor | None = None, **_: Any) -> BaseModelOutput:
        hidden = args[0] if inputs_embeds is None else inputs_embeds
        return BaseModelOutput(torch.cat([one(tile[None]) for tile in hidden]))

    def whole(pixels: Tensor, **_: Any) -> BaseModelOutput:  # LLaVA's takes what its layers gave
        rows = forward(vision.embeddings(pixels)).last_hidden_state
        return BaseModelOutput(hidden_states=(rows,))

    is_llava = family.name == "llava_onevision"
    changed, by = (vision, whole) if is_llava else (vision.encoder, forward)
    with patch.object(changed, "forward", by):
        yield


def unit_plainly(family: Family, patches: Tensor, grid: Grid, num_kept: int) -> Embeddings:
    """One unit through a Qwen tower, in raster order, each run of patches by itself."""
    tower: Any = as_published(family.tower)
    inputs = family.adapter.tower_inputs((grid,), CPU)  # type: ignore[attr-defined]
    hidden = tower.patch_embed(patches)
    if "interp_indices" in inputs:
        hidden = hidden + (
            tower.pos_embed(inputs["interp_indices"]) * inputs["interp_weights"][:, :, None]
        ).sum(1)
    if hasattr(tower, "embeddings"):
        at = inputs["position_ids"].unbind(1)
        lengths = inputs["cu_seqlens"].diff()
        hidden = tower.embeddings(tower.post_conv_layernorm(hidden), lengths, inputs["grid_thw"], *at)
    cos, sin = (each.unflatten(0, (-1, 4)) for each in tower.rotary_pos_emb(hidden, inputs["position_ids"]))
    hidden = hidden.unflatten(0, (-1, 4))  # [S, patches of a cell, C]
    places, there = list(range(len(hidden))), torch.arange(len(hidden))
    whole = [places]
    windows = whole
    if "window_index" in inputs:
        ends = (inputs["cu_window_seqlens"] // 4).tolist()
        windows = [inputs["window_index"][a:b].tolist() for a, b in pairwise(ends)]
    layers = []
    for number, block in enumerate(tower.blocks):
        if number == MERGE_LAYER:
            places, there = merged_plainly(hidden.flatten(1), grid.h // 2, grid.w // 2, num_kept)
            hidden = averages(hidden, there)
        is_full = number in getattr(tower, "fullatt_block_indexes", range(100))
        after = hidden.clone()
        for run in whole if is_full else windows:
            rows = [row for row, place in enumerate(places) if place in run]
            if rows:
                cells = [places[row] for row in rows]
                after[rows] = block(
                    hidden[rows].flatten(0, 1),
                    cu_seqlens=torch.tensor([0, 4 * len(rows)], dtype=torch.int32),
                    position_embeddings=(cos[cells].flatten(0, 1), sin[cells].flatten(0, 1)),
                ).unflatten(0, (-1, 4))
        hidden = after
        if number in getattr(tower, "deepstack_visual_indexes", ()):
            merger = tower.deepstack_merger_list[tower.deepstack_visual_indexes.index(number)]
            layers.append(merger(hidden.flatten(0, 1))[there])
    hidden = hidden.flatten(0, 1)
    if hasattr(tower, "downsample"):
        cells = tower.post_layernorm(hidden).unflatten(0, (-1, 2, 2))
        hidden = tower.downsample(cells.permute(0, 3, 1, 2)).flatten(1)
    return Embeddings(tower.merger(hidden)[there], tuple(layers))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_qwen_tower_equals_its_layers_on_gathered_cells(
    families: dict[str, Family], name: str, share: float
) -> None:
    """Windows that lose all of their cells, edges that fill no block, two runs in one call."""
    family = families[name]
    runs = batch_of(family, (Grid(2, 12, 10), Grid(1, 12, 10)))
    num_kept = Blocks.of(6, 5).num_kept(share)
    encoder = FrameEncoder(family.adapter, family.tower, merge=TowerMerge(share, MERGE_LAYER))
    for ours, run in zip(encoder.encode(runs), runs, strict=True):
        units = [
            unit_plainly(family, each, run.grid.cut(1), num_kept) for each in run.values.chunk(run.grid.t)
        ]
        layers = zip(*(unit.deepstack for unit in units), strict=True)
        theirs = Embeddings(torch.cat([unit.rows for unit in units]), tuple(map(torch.cat, layers)))
        assert_same_but_for_batching(ours, theirs)
        assert len(ours.rows.unique(dim=0)) == num_kept * run.grid.t


def frame_plainly(family: Family, patches: Tensor, grid: Grid, num_kept: int) -> Tensor:
    """One frame through VideoLLaMA 3's tower: its rows [S, C]."""
    tower: Any = family.tower
    vision, sizes = tower.vision_model, torch.tensor([[1, grid.h, grid.w]])
    hidden = vision.embeddings(patches)
    positions = vision.rotary_pos_emb(hidden, get_vision_position_ids(sizes, 2))
    cos, sin, hidden = (each.unflatten(0, (-1, 4)) for each in (*positions, hidden))
    there = torch.arange(len(hidden))
    for number, layer in enumerate(vision.encoder.layers):
        if number == MERGE_LAYER:
            places, there = merged_plainly(hidden.flatten(1), grid.h // 2, grid.w // 2, num_kept)
            hidden, cos, sin = averages(hidden, there), cos[places], sin[places]
        hidden = layer(
            hidden.flatten(0, 1),
            cu_seqlens=torch.tensor([0, 4 * len(hidden)], dtype=torch.int32),
            position_embeddings=(cos.flatten(0, 1), sin.flatten(0, 1)),
        ).unflatten(0, (-1, 4))
    rows = vision.post_layernorm(hidden[there].flatten(0, 1))
    found: Tensor = tower.projector(vision.pixel_unshuffle(rows, sizes, torch.tensor([2])))
    return found


@torch.inference_mode()
def test_a_tower_that_averages_patches_equals_its_layers_on_gathered_cells(
    families: dict[str, Family],
) -> None:
    family, grid = families["video_llama_3"], Grid(2, 12, 10)
    patches = torch.randn(grid.num_patches, 3 * 14 * 14)
    encoder = FrameEncoder(family.adapter, family.tower, merge=TowerMerge(0.5, MERGE_LAYER))
    (ours,) = encoder.encode([PatchRun("video", patches, grid)])
    num_kept = Blocks.of(6, 5).num_kept(0.5)
    theirs = [frame_plainly(family, each, grid, num_kept) for each in patches.chunk(2)]
    assert_same_but_for_batching(ours, Embeddings(torch.cat(theirs)))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["llava_onevision", "internvl", "smolvlm"])
@torch.inference_mode()
def test_a_tile_tower_equals_its_layers_on_gathered_patches(
    families: dict[str, Family], name: str, share: float
) -> None:
    family = families[name]
    run = run_of(family, 3)
    encoder = FrameEncoder(family.adapter, family.tower, merge=TowerMerge(share, MERGE_LAYER))
    (ours,) = encoder.encode([run])
    side = family.adapter.patches_per_side  # type: ignore[attr-defined]
    with tiles_plainly(family, Blocks.of(side, side).num_kept(share)):
        (theirs,) = FrameEncoder(family.adapter, family.tower).encode([run])
    assert_same_but_for_batching(ours, theirs)


def run_of(family: Family, num_units: int) -> PatchRun:
    plan = family.plan(clip_of(family), SAMPLING)
    frames = noise(num_units * plan.frames_per_unit, *plan.size, 3, seed=3)
    return FrameEncoder(family.adapter, family.tower).patches(frames, plan.part(0, num_units))


@torch.inference_mode()
def test_off_is_exact_and_leaves_the_tower_as_it_was(family: Family) -> None:
    run = run_of(family, 3)
    plain = FrameEncoder(family.adapter, family.tower)
    (before,) = plain.encode([run])
    merging = FrameEncoder(family.adapter, family.tower, merge=TowerMerge(0.5))
    (merged,) = merging.encode([run])
    (after,) = plain.encode([run])
    for rows, fewer, again in zip(all_rows(before), all_rows(merged), all_rows(after), strict=True):
        assert torch.equal(rows, again)
        assert rows.shape == fewer.shape
    assert not torch.equal(before.rows, merged.rows)


@torch.inference_mode()
def test_requests_are_merged_as_they_ask_unless_the_tower_has_a_share_of_its_own(family: Family) -> None:
    run = run_of(family, 3)

    def encoded(merge: TowerMerge | None, asked: float | None) -> Tensor:
        return FrameEncoder(family.adapter, family.tower, merge=merge).encode([run], asked)[0].rows

    plain, half = encoded(None, None), encoded(TowerMerge(0.5), None)
    assert not torch.equal(plain, half)
    assert torch.equal(encoded(None, 0.5), half)
    assert torch.equal(encoded(TowerMerge(0.5), 0.9), half)
    assert torch.equal(encoded(TowerMerge(1.0), 0.5), plain)


@torch.inference_mode()
def test_a_request_is_encoded_whole_where_the_tower_cannot_merge(families: dict[str, Family]) -> None:
    family = families["qwen2_5_vl"]
    run = run_of(family, 3)
    encoder = FrameEncoder(family.adapter, family.tower)
    (whole,) = encoder.encode([run])
    for error in (UnsupportedModelError("not this family"), RequestError("not a tower of one layer")):
        with patch.object(family.adapter, "tower_merger", side_effect=error):
            (asked,) = encoder.encode([run], 0.5)
        assert torch.equal(asked.rows, whole.rows)


@torch.inference_mode()
def test_a_unit_is_merged_alike_in_any_batch(family: Family) -> None:
    run = run_of(family, 3)
    encoder = FrameEncoder(family.adapter, family.tower, merge=TowerMerge(0.5))
    (whole,) = encoder.encode([run])
    first = replace(run, values=run.values[: len(run.values) // 3], grid=run.grid.cut(1))
    (alone,) = encoder.encode([first])
    assert_same_but_for_batching(alone, whole.cut(0, len(alone)))


def all_rows(embeddings: Embeddings) -> tuple[Tensor, ...]:
    return (embeddings.rows, *embeddings.deepstack)


@pytest.mark.parametrize(("height", "width"), [(3, 3), (4, 6), (7, 5), (1, 2), (27, 27)])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_cells_are_merged_as_behind_the_tower(height: int, width: int, share: float) -> None:
    """As many as said beforehand; those of the block most alike; never the key set."""
    blocks = Blocks.of(height, width)
    cells = torch.rand(3, height * width, 8, generator=torch.Generator().manual_seed(1))
    num_kept = blocks.num_kept(share)
    merged = merge_cells(cells, blocks, num_kept)
    assert merged.kept.shape == (3, num_kept)
    for unit, kept, there in zip(cells, merged.kept, merged.there, strict=True):
        their_kept, their_there = merged_plainly(unit, height, width, num_kept)
        assert kept.tolist() == their_kept
        assert torch.equal(there, their_there)
    expanded = merged.expand(merged.merge(cells).flatten(0, 1)).view_as(cells)
    torch.testing.assert_close(expanded.mean(1), cells.mean(1))


# What towers that cannot merge do to patches.
UNMERGED = {"gemma4": "pools", "minicpmv4_6": "joins", "minicpmv4_7": "joins"}


def test_what_cannot_be_is_refused(families: dict[str, Family]) -> None:
    for share in (0.1, 1.1, float("nan")):
        with pytest.raises(RequestError, match="tower_share"):
            TowerMerge(share)
    with pytest.raises(RequestError, match="allowed: at least 1"):
        TowerMerge(0.5, 0)
    with pytest.raises(RequestError, match="alone"):
        tower_merge(None, 2)
    assert tower_merge(None, None) is None
    assert tower_merge(1.0, None) == TowerMerge(1.0)
    for name, family in families.items():
        if name not in UNMERGED:
            with pytest.raises(RequestError, match=r"allowed: 1 to [12], below"):
                FrameEncoder(family.adapter, family.tower, merge=TowerMerge(0.5, 50))
    for name, why in UNMERGED.items():
        with pytest.raises(UnsupportedModelError, match=f"{why} patches by their places"):
            FrameEncoder(families[name].adapter, families[name].tower, merge=TowerMerge(0.5))


def test_a_model_that_takes_an_earlier_layer_is_refused(families: dict[str, Family]) -> None:
    config: Any = families["internvl"].model.config
    check_last_layer(config)
    with (
        patch.object(config, "vision_feature_layer", -2),
        pytest.raises(UnsupportedModelError, match=r"vision_feature_layer=-2; allowed: Qwen2\.5-VL"),
    ):
        check_last_layer(config)


@torch.inference_mode()
def test_later_layers_compute_fewer_products(families: dict[str, Family]) -> None:
    """Three layers: one computes all; the others compute a half."""
    family = families["qwen3_vl"]
    runs = batch_of(family, (Grid(4, 24, 24),))
    tower: Any = family.tower

    def flops(merge: TowerMerge | None) -> int:
        encoder = FrameEncoder(family.adapter, tower, merge=merge)
        with counted_flops() as counter:
            encoder.encode(runs)
        return counter.get_total_flops()

    whole, half, quarter = flops(None), flops(TowerMerge(0.5)), flops(TowerMerge(0.25))
    assert 0.5 * whole < half < 0.7 * whole
    assert quarter < 0.9 * half


class Layer(torch.nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return hidden if mask is None else hidden + mask


def test_a_mask_of_all_patches_is_not_given_to_later_layers() -> None:
    """It has a row for each patch, where fewer are left; a tile has no patch that is masked."""
    layers = [Layer(), Layer()]
    hidden = torch.rand(2, 1 + 16, 8, generator=torch.Generator().manual_seed(1))
    with TileMerger(layers, 4, TowerMerge(0.5)).during(()):
        mask = torch.ones(2, 17, 1)
        merged = layers[1](layers[0](hidden, mask), mask)
    assert merged.shape == hidden.shape
    assert torch.equal(merged[:, 0], hidden[:, 0] + 1)
    assert len(merged[0, 1:].unique(dim=0)) == 8
