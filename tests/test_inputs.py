"""What the model is fed equals what the Hugging Face processor and the authors' position rule make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epd.encoders import FrameSampling, PromptPlan
from epd.stages.media import PlannedMedia
from epd.types import StageTimings
from tests.colocated import decode_groups, plan_media
from tests.positions import adapter_like_transformers, expected_positions, positions_in_transformers
from tests.reference import Subject, processor_inputs
from tests.video.plain_decoder import reference_decode

QUESTION = "Which colour is it? Ä, 漢, 🙂"
CASES = {
    "text": (),
    "image": ("image",),
    "images": ("image", "wide_image", "image"),
    "video": ("video",),
    "videos": ("video", "tall_video"),
    "video and image": ("video", "image"),
    "image, video, image": ("wide_image", "tall_video", "image"),
}
SAMPLINGS = {
    "default": FrameSampling(),
    "1 fps": FrameSampling(fps=1.0),
    "3.7 fps": FrameSampling(fps=3.7),
    "6 frames": FrameSampling(num_frames=6),
    "7 frames": FrameSampling(num_frames=7),
}


def planned(
    subject: Subject, paths: list[Path], sampling: FrameSampling
) -> tuple[list[PlannedMedia], PromptPlan]:
    adapter = subject.pipeline.adapter
    items = [plan_media(adapter, path, sampling) for path in paths]
    return items, adapter.plan_prompt([item.plan for item in items], QUESTION)


def pixel_values(subject: Subject, item: PlannedMedia, group_tokens: int) -> torch.Tensor:
    """Patches of one item, float32 [P, D], made group by group as the pipeline makes them."""
    groups = decode_groups([item], group_tokens, StageTimings())
    return torch.cat([subject.pipeline.adapter.preprocess(each.frames, each.group.plan) for each in groups])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("names", CASES.values(), ids=CASES)
def test_prompt_equals_the_processors(
    subject: Subject, media: dict[str, Path], names: tuple[str, ...], sampling: FrameSampling
) -> None:
    paths = [media[name] for name in names]
    items, prompt = planned(subject, paths, sampling)
    theirs = processor_inputs(subject.processor, paths, QUESTION, sampling)

    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    for kind in ("image", "video"):
        grids = [[i.plan.grid.t, i.plan.grid.h, i.plan.grid.w] for i in items if i.plan.kind == kind]
        assert grids == (theirs[f"{kind}_grid_thw"].tolist() if f"{kind}_grid_thw" in theirs else [])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(
    "names", [names for names in CASES.values() if names], ids=[k for k in CASES if k != "text"]
)
def test_positions_equal_the_models(
    subject: Subject, media: dict[str, Path], names: tuple[str, ...], sampling: FrameSampling
) -> None:
    paths = [media[name] for name in names]
    items, prompt = planned(subject, paths, sampling)
    theirs = processor_inputs(subject.processor, paths, QUESTION, sampling)
    switched = adapter_like_transformers(subject.path).plan_prompt([item.plan for item in items], QUESTION)

    assert (prompt.positions.tolist(), prompt.next_position) == expected_positions(subject.model, theirs)
    found = switched.positions.tolist(), switched.next_position
    assert found == positions_in_transformers(subject.model, theirs)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("group_tokens", [1, 30, 10_000])
def test_pixel_values_equal_the_processors_bit_for_bit(
    subject: Subject, media: dict[str, Path], group_tokens: int, sampling: FrameSampling
) -> None:
    paths = [media[name] for name in ("wide_image", "video", "image", "tall_video")]
    items, _ = planned(subject, paths, sampling)
    theirs = processor_inputs(subject.processor, paths, QUESTION, sampling)

    ours = {kind: [i for i in items if i.plan.kind == kind] for kind in ("image", "video")}
    images = torch.cat([pixel_values(subject, item, group_tokens) for item in ours["image"]])
    videos = torch.cat([pixel_values(subject, item, group_tokens) for item in ours["video"]])

    assert torch.equal(images, theirs["pixel_values"])
    assert torch.equal(videos, theirs["pixel_values_videos"])


def test_placeholders_stand_where_the_visual_tokens_are(subject: Subject, media: dict[str, Path]) -> None:
    paths = [media[name] for name in ("video", "image")]
    items, prompt = planned(subject, paths, FrameSampling())
    config = subject.model.config

    for item, token_id in zip(prompt.media, (config.video_token_id, config.image_token_id), strict=True):
        indices = item.token_indices(0, item.plan.num_units)
        assert len(indices) == item.plan.num_tokens
        assert set(prompt.token_ids[indices].tolist()) == {token_id}
    assert prompt.num_visual_tokens == sum(item.plan.num_tokens for item in items)
    assert prompt.prefix_length == int(prompt.media[-1].token_indices(0, 1)[-1]) + 1


def test_a_video_of_one_frame_fills_its_unit_with_it(subject: Subject, tmp_path: Path) -> None:
    from tests.media import write_video

    path = write_video(tmp_path / "one.mp4", num_frames=1)
    (item,), _ = planned(subject, [path], FrameSampling())
    frame = torch.from_numpy(reference_decode(path, [0.0], item.plan.size).data)

    patches = pixel_values(subject, item, 1)

    assert item.plan.num_frames == 1
    assert item.plan.grid.t == 1
    assert torch.equal(patches, subject.pipeline.adapter.preprocess(torch.cat([frame, frame]), item.plan))
