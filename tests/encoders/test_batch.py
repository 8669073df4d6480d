"""Units of a video that do not change: encoded once, with the embeddings that encoding all of them gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from epd.encoders import MediaPlan
from epd.encoders.adapter import Embeddings, PatchRun
from epd.encoders.groups import FrameEncoder, encode_moving
from epd.encoders.plans import Grid
from epd.errors import RequestError
from tests.encoders.fakes import FakeFamily, fake_plan
from tests.encoders.families import Clip, Family, Picture
from tests.encoders.tolerances import assert_same_but_for_batching
from tests.stages.encode.workers import SAMPLING, Workers, clip_of, merged, noise, plan_all

# What each unit of a video shows: what comes back later has moved meanwhile.
SHOWN = (0, 0, 0, 1, 0, 2, 2, 3)
IS_STATIC = (False, True, True, False, False, False, True, False)


def standing(family: Family, shown: Sequence[int], seed: int = 0) -> tuple[MediaPlan, Tensor]:
    """A video that is sampled in units of equal pictures, and these frames, uint8 [N, h, w, 3]."""
    plan = family.plan(clip_of(family), SAMPLING)
    pictures = noise(max(shown) + 1, plan.frames_per_unit, *plan.size, 3, seed=seed)
    return plan, pictures[list(shown)].flatten(0, 1)


def units(embeddings: Embeddings, num_units: int) -> list[Tensor]:
    """[units, tokens, C] of the rows and of each deepstack layer."""
    return [rows.unflatten(0, (num_units, -1)) for rows in (embeddings.rows, *embeddings.deepstack)]


@torch.inference_mode()
def test_what_stands_still_is_encoded_once(tiled_or_not: Family) -> None:
    """Of two videos and in one call of the tower: nothing is taken from another run."""
    family = tiled_or_not
    plan, frames = standing(family, SHOWN)
    _, others = standing(family, (0, 1, 1), seed=1)
    plain = FrameEncoder(family.adapter, family.tower)
    runs = [plain.patches(frames, plan.part(0, 8)), plain.patches(others, plan.part(0, 3))]
    whole = plain.encode(runs)
    seen: list[list[int]] = []

    def encode_batch(runs: Sequence[PatchRun]) -> list[Embeddings]:
        seen.append([run.grid.t for run in runs])
        return family.adapter.encode_batch(family.tower, runs)

    exact, num_skipped = encode_moving(encode_batch, runs, 0.0)
    assert (num_skipped, seen) == (sum(IS_STATIC) + 1, [[5, 2]])
    for ours, theirs in zip(exact, whole, strict=True):
        assert_same_but_for_batching(ours, theirs)
    for rows in units(exact[0], 8):
        for unit, is_static in enumerate(IS_STATIC):
            assert torch.equal(rows[unit], rows[unit - 1]) == is_static
    assert encode_moving(encode_batch, runs, None)[1] == 0
    assert seen[1:] == [[8, 3]]


@torch.inference_mode()
def test_one_grey_level_is_a_change_unless_it_is_tolerated(family: Family) -> None:
    plan, frames = standing(family, (0, 0))
    frames[:] = 100  # of one colour, so that resizing changes nothing
    frames[-1] = 101
    level = 1.01 / 255 / 0.26  # by the least standard deviation of the families here; the largest is 0.5
    for tolerance, num_skipped in ((0.0, 0), (level / 2, 0), (level, 1)):
        encoder = FrameEncoder(family.adapter, family.tower, tolerance)
        (embeddings,) = encoder.encode([encoder.patches(frames, plan.part(0, 2))])
        assert encoder.num_skipped == num_skipped
        assert all(torch.equal(*rows) == bool(num_skipped) for rows in units(embeddings, 2))


def test_slow_changes_add_up() -> None:
    """A unit is compared with the last one that was encoded, not with the one before it."""
    encoder = FrameEncoder(FakeFamily(), torch.nn.Identity(), skip_static=1.0)
    run = PatchRun("video", torch.tensor([0.0, 1.0, 2.0, 3.0, 3.0]), Grid(5, 1, 1))
    (embeddings,) = encoder.encode([run])
    assert embeddings.rows[:, 0].tolist() == [0, 0, 2, 2, 2]
    assert encoder.num_skipped == 3


@torch.inference_mode()
def test_tiles_of_an_image_are_all_encoded(families: dict[str, Family]) -> None:
    family = families["internvl"]
    white = Picture(torch.full((60, 120, 3), 255, dtype=torch.uint8))
    plan = family.plan(white, SAMPLING)
    assert plan.num_units > 1
    encoder = FrameEncoder(family.adapter, family.tower, 0.0)
    encoder.encode([encoder.patches(family.frames(white, plan), plan)])
    assert encoder.num_skipped == 0


@pytest.mark.parametrize("num_encoders", [1, 3])
def test_workers_skip_what_stands_still_and_cache_the_rest(family: Family, num_encoders: int) -> None:
    """Groups of four units: what stands still is encoded once in each."""
    plan, frames = standing(family, [0] * 6 + [1] * 2)
    clip = Clip(frames, 1.0)  # SmolVLM takes no more than a frame a second
    plans, groups = plan_all(family, [clip], group_tokens=4 * plan.tokens_per_unit)
    assert plans[0].num_units == 8
    whole = merged(family.adapter, plans, Workers(family, 1).encode([clip], groups))
    workers = Workers(family, num_encoders, skip_static=0.0)
    for request_id in ("first", "again"):
        (ours,) = merged(family.adapter, plans, workers.encode([clip], groups, request_id=request_id))
        assert_same_but_for_batching(ours, whole[0])
        counts = [encoder.counts for encoder in workers.encoders]
        assert sum(each.num_units_skipped for each in counts) == 8 - len({0, 4, 6})
        assert sum(each.num_patches for each in counts) == sum(group.spec.num_patches for group in groups)
    workers.check()


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused(tolerance: float) -> None:
    with pytest.raises(RequestError, match=f"skip_static of {tolerance:g}; allowed: 0 or more"):
        FrameEncoder(FakeFamily(), torch.nn.Identity(), tolerance)


def test_nothing_is_skipped_unless_it_is_asked_for() -> None:
    encoder = FrameEncoder(FakeFamily(), torch.nn.Identity())
    encoder.encode([encoder.patches(torch.zeros(3, 1, 1, 3, dtype=torch.uint8), fake_plan(3))])
    assert encoder.num_skipped == 0
