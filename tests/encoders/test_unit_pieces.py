"""A batch that is larger than the tower takes: pieces of whole units, which change no embedding."""

from __future__ import annotations

import pytest
import torch

from epd.encoders import FrameSampling
from epd.encoders.adapter import PatchRun
from epd.encoders.groups import FrameEncoder, unit_pieces
from epd.encoders.plans import Grid
from tests.encoders.fakes import FakeFamily
from tests.encoders.families import Clip, Family, Picture
from tests.encoders.tolerances import assert_same_but_for_batching
from tests.stages.encode.workers import noise


@pytest.mark.parametrize(
    ("max_patches", "units"),
    [(24, [5]), (20, [5]), (19, [4, 1]), (9, [2, 2, 1]), (4, [1] * 5), (1, [1] * 5)],
)
def test_pieces_are_whole_units_in_order(max_patches: int, units: list[int]) -> None:
    run = PatchRun("image", torch.arange(20), Grid(5, 2, 2))
    pieces = unit_pieces(run, max_patches)
    assert [piece.grid for piece in pieces] == [Grid(count, 2, 2) for count in units]
    assert torch.equal(torch.cat([piece.values for piece in pieces]), run.values)


def test_runs_share_a_call_only_if_it_takes_all_of_them() -> None:
    runs = [PatchRun("video", torch.arange(float(count)), Grid(count, 1, 1)) for count in (2, 3)]
    for max_patches, calls in ((None, [2]), (5, [2]), (4, [1, 1]), (2, [1, 1, 1])):
        family = FakeFamily()
        found = FrameEncoder(family, torch.nn.Identity(), max_patches=max_patches).encode(runs)
        assert family.batch_sizes == calls
        assert [each.rows[:, 0].tolist() for each in found] == [[0, 1], [0, 1, 2]]


@torch.inference_mode()
def test_pieces_give_the_embeddings_of_the_whole(tiled_or_not: Family) -> None:
    """A video in every family; its last unit may have one frame only."""
    family = tiled_or_not
    plan = family.plan(Clip(noise(7, 84, 112, 3), 1.0), FrameSampling(num_frames=7))
    assert plan.num_units > 2
    frames = noise(len(plan.frame_indices), *plan.size, 3)
    whole, pieces = (
        FrameEncoder(family.adapter, family.tower, max_patches=limit)
        for limit in (None, plan.grid.cut(2).num_patches)
    )
    run = whole.patches(frames, plan)
    assert pieces.max_patches is not None
    assert {piece.grid.t for piece in unit_pieces(run, pieces.max_patches)} <= {1, 2}
    assert_same_but_for_batching(pieces.encode([run])[0], whole.encode([run])[0])


@torch.inference_mode()
def test_the_tower_sees_no_more_tiles_than_it_takes(families: dict[str, Family]) -> None:
    family = families["internvl"]
    picture = Picture(noise(84, 140, 3))
    plan = family.plan(picture, FrameSampling())
    assert plan.num_units > 3
    seen: list[int] = []
    hook = family.tower.get_submodule("vision_tower").register_forward_pre_hook(
        lambda _module, args, kwargs: seen.append(len(args[0] if args else kwargs["pixel_values"])),
        with_kwargs=True,
    )
    encoder = FrameEncoder(family.adapter, family.tower, max_patches=3 * plan.grid.h * plan.grid.w)
    encoder.encode([encoder.patches(family.frames(picture, plan), plan)])
    hook.remove()
    assert max(seen) == 3
    assert sum(seen) == plan.num_units
