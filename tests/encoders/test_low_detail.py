"""Images in low detail equal what the processor makes of them with few pixels, or with a single tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from epd.encoders import PixelLimits, load_adapter
from epd.encoders.groups import plan_groups
from epd.encoders.identity import prompt_identity
from epd.errors import RequestError
from epd.pixel_limits import LOW_DETAIL_PIXELS
from tests.encoders.families import QUESTION, Family, Picture
from tests.encoders.tiny_tiles import BUILDERS

# transformers near 5.17 hands torch tensors to numpy in InternVL's processor, in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

LOW = PixelLimits(is_low_detail=True)
# The option by which each processor leaves images whole.
WHOLE: dict[str, dict[str, Any]] = {
    "internvl": {"crop_to_patches": False},
    "smolvlm": {"do_image_splitting": False},
}


def noise(height: int, width: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=draw)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("size", [(40, 170), (170, 40), (90, 90), (16, 16)], ids=str)
def test_an_image_is_one_tile(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    family = Family.load(name, BUILDERS[name](tmp_path / name))
    adapter, image = family.adapter, noise(*size)
    picture = image.permute(2, 0, 1)
    text = family._text([Picture(image)], QUESTION)
    images = [[picture]] if name == "smolvlm" else [picture]
    theirs = family.processor(text=[text], images=images, return_tensors="pt", **WHOLE[name])
    plan = adapter.plan_image(*size, LOW)

    prompt = adapter.plan_prompt([plan], QUESTION)

    assert plan.num_units == 1
    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    patches = adapter.preprocess(adapter.resize(image, plan), plan)
    assert torch.equal(patches, theirs["pixel_values"].reshape(patches.shape))


@pytest.mark.parametrize("name", WHOLE)
def test_the_tile_is_another_than_the_first_of_several(tmp_path: Path, name: str) -> None:
    adapter = load_adapter(BUILDERS[name](tmp_path / name))
    low, high = (adapter.plan_image(60, 170, pixels) for pixels in (LOW, PixelLimits()))
    assert high.num_units > low.num_units == 1
    low_id, high_id = (prompt_identity(adapter.plan_prompt([plan], "x"), ["hash"]) for plan in (low, high))
    ours, theirs = (set(each.rows[:, 1].tolist()) - {0} for each in (low_id, high_id))
    assert not ours & theirs
    keys = [
        {group.spec.key for group in plan_groups([plan], ["hash"], model="m", group_tokens=1)}
        for plan in (low, high)
    ]
    assert not keys[0] & keys[1]


def test_a_family_that_always_cuts_refuses_it(tmp_path: Path) -> None:
    adapter = load_adapter(BUILDERS["llava_onevision"](tmp_path / "model"))
    with pytest.raises(RequestError, match="received detail low; allowed: auto and high"):
        adapter.check_pixels([("image", LOW)], None)
    adapter.check_pixels([("image", PixelLimits())], None)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("asked", [{}, {"max_pixels": 300_000}, {"max_pixels": 5000}], ids=str)
@pytest.mark.filterwarnings("ignore:Passing `min_pixels` and `max_pixels`:FutureWarning")
def test_an_image_has_few_pixels(checkpoints: dict[str, Path], name: str, asked: dict[str, int]) -> None:
    adapter = load_adapter(checkpoints[name])
    processor = AutoProcessor.from_pretrained(checkpoints[name], local_files_only=True)
    least = int(processor.image_processor.size["shortest_edge"])
    for each in (adapter, processor):
        own = (each.checkpoint.processor if each is adapter else each).image_processor
        own.size = {"shortest_edge": least, "longest_edge": 400_000}
    image = noise(700, 900)
    low = PixelLimits(max_pixels=asked.get("max_pixels"), is_low_detail=True)
    adapter.check_pixels([("image", low)], None)
    few = min(LOW_DETAIL_PIXELS, asked.get("max_pixels", LOW_DETAIL_PIXELS))
    theirs = processor.image_processor(images=[image.permute(2, 0, 1)], max_pixels=few, return_tensors="pt")

    plan = adapter.plan_image(700, 900, low)

    assert [plan.grid.t, plan.grid.h, plan.grid.w] == theirs["image_grid_thw"][0].tolist()
    patches = adapter.preprocess(adapter.resize(image, plan), plan)
    assert torch.equal(patches, theirs["pixel_values"])
    assert plan.num_tokens < adapter.plan_image(700, 900).num_tokens
    assert adapter.plan_image(60, 60, low) == adapter.plan_image(60, 60, PixelLimits(max_pixels=few))


def test_more_pixels_than_low_detail_has_are_refused(checkpoints: dict[str, Path]) -> None:
    adapter = load_adapter(checkpoints["qwen2_5_vl"])
    asked = PixelLimits(min_pixels=LOW_DETAIL_PIXELS + 1, is_low_detail=True)
    with pytest.raises(RequestError, match=r"min_pixels 262,145, detail low, 262,144 pixels; allowed"):
        adapter.check_pixels([("image", asked)], 10**9)
    adapter.check_pixels([("image", PixelLimits(LOW_DETAIL_PIXELS, is_low_detail=True))], 10**9)
