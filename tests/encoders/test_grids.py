"""What the towers take of grids is what they compute themselves, in any batch."""

from __future__ import annotations

import pytest
import torch

from epd.encoders.adapter import PatchRun
from epd.encoders.device import CPU
from epd.encoders.plans import Grid
from tests.encoders.families import Family
from tests.encoders.test_qwen_tower import NAMES

BATCHES = [
    (Grid(1, 4, 4),),
    (Grid(3, 4, 6),),
    (Grid(2, 6, 4), Grid(1, 6, 4)),
]


@pytest.mark.parametrize("grids", BATCHES, ids=len)
@pytest.mark.parametrize("name", NAMES)
def test_a_tower_gives_the_same_with_its_inputs_computed_before(
    families: dict[str, Family], name: str, grids: tuple[Grid, ...]
) -> None:
    family = families[name]
    spec = family.adapter.video_spec  # type: ignore[attr-defined]
    size = 3 * spec.frames_per_unit * spec.side**2
    patches = torch.randn(sum(grid.num_patches for grid in grids), size)
    parts = torch.split(patches, [grid.num_patches for grid in grids])
    runs = [PatchRun("video", part, grid) for part, grid in zip(parts, grids, strict=True)]
    with torch.inference_mode():
        ours = family.adapter.encode_batch(family.tower, runs)
        thws = torch.tensor([[grid.t, grid.h, grid.w] for grid in grids])
        theirs = family.tower(patches, grid_thw=thws, return_dict=True)
    assert torch.equal(torch.cat([each.rows for each in ours]), theirs.pooler_output)
    for index, layer in enumerate(getattr(theirs, "deepstack_features", None) or []):
        assert torch.equal(torch.cat([each.deepstack[index] for each in ours]), layer)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_batch_seen_before_is_not_computed_again(families: dict[str, Family], name: str) -> None:
    adapter = families[name].adapter
    first = adapter.tower_inputs((Grid(2, 4, 8),), CPU)  # type: ignore[attr-defined]
    assert adapter.tower_inputs((Grid(2, 4, 8),), CPU) is first  # type: ignore[attr-defined]
