"""Images and frames that a request wants smaller or larger equal what the Hugging Face processor makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epd import pixel_settings
from epd.encoders import Adapter, FrameSampling, PixelLimits, VideoFacts
from epd.errors import RequestError
from epd.stages.media import PlannedMedia
from epd.types import MediaKind, StageTimings
from tests.colocated import decode_groups, plan_media
from tests.encoders.families import Family
from tests.encoders.tiny_tiles import BUILDERS
from tests.reference import Subject, processor_inputs

QUESTION = "Which colour is it?"
SAMPLING = FrameSampling(num_frames=6)
MEDIA = {
    "images": ("image", "wide_image"),
    "videos": ("video", "tall_video"),
    "image and video": ("wide_image", "video"),
}
# Arguments of the processor's call, as a request has them.
ASKED: dict[str, dict[str, Any]] = {
    "fewer": {"max_pixels": 4000},
    "the least": {"max_pixels": 1},
    "more": {"min_pixels": 8000, "max_pixels": 9000},
    "more alone": {"min_pixels": 6500},
    "below the processor's least": {"max_pixels": 2000},
    "size": {"size": {"shortest_edge": 1500, "longest_edge": 4500}},
    "size of a video": {"size": {"shortest_edge": 10_000, "longest_edge": 40_000}},
    "size, and a limit after it": {
        "size": {"shortest_edge": 1500, "longest_edge": 4500},
        "max_pixels": 2500,
        "min_pixels": 1600,
    },
}


def limits_of(asked: dict[str, Any]) -> PixelLimits:
    size = asked.get("size")
    edges = None if size is None else (size["shortest_edge"], size["longest_edge"])
    return PixelLimits(asked.get("min_pixels"), asked.get("max_pixels"), edges)


def patches(adapter: Adapter, items: list[PlannedMedia]) -> torch.Tensor:
    groups = [each for item in items for each in decode_groups([item], 30, StageTimings())]
    return torch.cat([adapter.preprocess(each.frames, each.group.plan) for each in groups])


@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("names", MEDIA.values(), ids=MEDIA)
def test_tokens_grids_and_pixels_equal_the_processors(
    subject: Subject, media: dict[str, Path], names: tuple[str, ...], asked: dict[str, Any]
) -> None:
    adapter, paths = subject.pipeline.adapter, [media[name] for name in names]
    theirs = processor_inputs(subject.processor, paths, QUESTION, SAMPLING, **asked)
    items = [plan_media(adapter, path, SAMPLING, limits_of(asked)) for path in paths]

    prompt = adapter.plan_prompt([item.plan for item in items], QUESTION)

    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    for kind, values in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        mine = [item for item in items if item.plan.kind == kind]
        if mine:
            grids = [[each.plan.grid.t, each.plan.grid.h, each.plan.grid.w] for each in mine]
            assert grids == theirs[f"{kind}_grid_thw"].tolist()
            assert torch.equal(patches(adapter, mine), theirs[values])


def test_limits_change_the_size(subject: Subject, media: dict[str, Path]) -> None:
    """The images and videos above are large enough for their limits to matter."""
    for name in ("image", "video"):
        sizes = {
            plan_media(subject.pipeline.adapter, media[name], SAMPLING, limits_of(asked)).plan.size
            for asked in ({}, ASKED["fewer"], ASKED["size"], ASKED["size of a video"])
        }
        assert len(sizes) >= 3, (name, sizes)


@pytest.mark.parametrize(
    ("pixels", "most", "words"),
    [
        (PixelLimits(max_pixels=10**15), None, "max_pixels 1,000,000,000,000,000; allowed: at most"),
        (PixelLimits(min_pixels=10**15), None, "min_pixels 1,000,000,000,000,000; allowed: at most"),
        (PixelLimits(size=(1, 10**15)), None, "size.longest_edge 1,000,000,000,000,000"),
        (PixelLimits(size=(100_000, 100_000)), 99_999, "allowed: at most 99,999 pixels"),
        (PixelLimits(size=(100_000, 100_000)), 100_000, ""),
        (PixelLimits(min_pixels=2, max_pixels=1), None, "raise the larger limit or lower the other"),
        (PixelLimits(min_pixels=2, size=(1, 1)), None, "raise the larger limit or lower the other"),
        (PixelLimits(max_pixels=1), None, ""),
    ],
)
@pytest.mark.parametrize("kinds", [("image",), ("video", "image")], ids=str)
def test_more_than_the_ceiling_is_refused(
    subject: Subject, kinds: tuple[MediaKind, ...], pixels: PixelLimits, most: int | None, words: str
) -> None:
    asked = [(kind, pixels) for kind in kinds]
    if not words:
        subject.pipeline.adapter.check_pixels(asked, most)
        return
    with pytest.raises(RequestError) as caught:
        subject.pipeline.adapter.check_pixels(asked, most)
    assert words in str(caught.value)


def test_a_limit_that_changes_no_video_is_refused(subject: Subject) -> None:
    """Qwen3-VL's processor takes `size` for videos and passes over the other two."""
    asked = PixelLimits(max_pixels=4000)
    check = subject.pipeline.adapter.check_pixels
    if subject.name == "qwen3_vl":
        with pytest.raises(
            RequestError, match=r"received mm_processor_kwargs\.max_pixels; allowed: with images"
        ):
            check([("video", asked)], None)
    else:
        check([("video", asked)], None)
    check([("video", asked), ("image", asked)], None)
    check([("video", PixelLimits(size=(1000, 4000)))], None)
    check([], None)


@pytest.mark.parametrize("name", ["internvl", "llava_onevision", "smolvlm"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_families_of_tiles_have_no_such_limits(tmp_path: Path, name: str, kind: MediaKind) -> None:
    adapter = Family.load(name, BUILDERS[name](tmp_path / name)).adapter
    for pixels, field in (
        (PixelLimits(min_pixels=1), "min_pixels"),
        (PixelLimits(max_pixels=1), "max_pixels"),
        (PixelLimits(size=(1, 1)), "size.shortest_edge"),
    ):
        with pytest.raises(RequestError, match=f"received mm_processor_kwargs.{field}; allowed: none"):
            adapter.check_pixels([(kind, pixels)], None)
    adapter.check_pixels([(kind, PixelLimits())], None)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl"])
def test_a_family_whose_authors_say_nothing_has_no_limits(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = Family.load(name, BUILDERS[name](tmp_path / name)).adapter
    asked = PixelLimits(cap_pixels_per_frame=True) if name == "qwen2_5_vl" else PixelLimits()
    facts = VideoFacts(6, 2.0, 60, 60)
    held = adapter.plan_video(facts, FrameSampling(), asked)
    monkeypatch.setattr(pixel_settings, "AUTHORS", {})
    assert adapter.plan_video(facts, FrameSampling(), asked) == held
