"""Gemma 3 from files on: its images, its prompts, its answers over workers, and what it refuses.

Of Gemma 4 pixels and refusals: tests/test_generic_families.py asks it in all ways.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

from epd import LLM
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.families.generic import GenericAdapter
from epd.encoders.patches import resize_image
from epd.engine_config import EngineConfig
from epd.errors import MediaLimitError, RequestError, UnsupportedMediaError, UnsupportedModelError
from epd.pixel_limits import PixelLimits
from epd.pixel_settings import PixelSettings
from epd.reduction import TowerMerge
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from tests.colocated import ColocatedPipeline
from tests.encoders.families import QUESTION, Family
from tests.encoders.tiny_gemma import IMAGE_TOKENS, build_gemma3, build_gemma4
from tests.reference import MAX_TOKENS, generated_as_it_is
from tests.stages.conftest import as_sent
from tests.test_tile_families import handed_over, text_of

SAMPLING = FrameSampling()
CASES = {"text": (), "image": ("image",), "images": ("wide_image", "image")}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.load("gemma3", build_gemma3(tmp_path_factory.mktemp("gemma") / "model"))


def expected(family: Family, media: list[Path]) -> tuple[int, ...]:
    return generated_as_it_is(family.model, family.their_inputs([as_sent(each) for each in media], SAMPLING))


@pytest.mark.parametrize("names", CASES.values(), ids=CASES)
def test_prompts_and_features_are_those_of_transformers(
    family: Family, media: dict[str, Path], names: tuple[str, ...]
) -> None:
    items = [as_sent(media[name]) for name in names]
    theirs, prompt = family.their_inputs(items, SAMPLING), family.prompt(items, SAMPLING)
    assert prompt.token_ids.tolist() == theirs["input_ids"][0].tolist()
    assert prompt.num_visual_tokens == len(names) * IMAGE_TOKENS
    if items:
        rows = torch.cat([family.encode(item, family.plan(item, SAMPLING)).rows for item in items])
        features, _ = family.their_features(theirs, "image")
        torch.testing.assert_close(rows, features.flatten(0, 1) if features.ndim > 2 else features)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("names", CASES.values(), ids=CASES)
def test_tokens_equal_generate(
    family: Family, media: dict[str, Path], names: tuple[str, ...], impl: str
) -> None:
    pipeline = ColocatedPipeline.load(family.path, EngineConfig(model_impl=impl))  # type: ignore[arg-type]
    assert isinstance(pipeline.adapter, GenericAdapter) == (impl == "transformers")
    paths = [media[name] for name in names]
    answer = pipeline.ask(paths, QUESTION, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(family, paths)


def test_handed_over_in_chunks_and_from_the_cache(family: Family, media: dict[str, Path]) -> None:
    asked = [[media[name] for name in names] for names in (*CASES.values(), CASES["images"])]
    with LLM(family.path, topology="1e1p1d", max_chunk_tokens=16, num_kv_tokens=4096) as llm:
        answers = [handed_over(llm, paths) for paths in asked]
    assert answers == [text_of(family, expected(family, paths)) for paths in asked]


def test_videos_and_sound_are_refused_in_one_line(family: Family) -> None:
    with pytest.raises(UnsupportedMediaError, match="hears nothing"):
        _ = family.adapter.audio
    with pytest.raises(UnsupportedMediaError, match="a video for a gemma3 model; allowed: images and text"):
        family.adapter.plan_video(VideoFacts(6, 2.0, 90, 120), SAMPLING)


def changed(family: Family, folder: Path, part: str, **settings: Any) -> Path:
    """A copy of a checkpoint with other settings of its processor."""
    shutil.copytree(family.path, folder)
    path = folder / "processor_config.json"
    file = json.loads(path.read_text())
    file[part] |= settings
    path.write_text(json.dumps(file))
    return folder


def test_images_that_are_cut_are_refused(family: Family, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="do_pan_and_scan=True"):
        load_adapter(changed(family, tmp_path / "model", "image_processor", do_pan_and_scan=True))


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.load("gemma4", build_gemma4(tmp_path_factory.mktemp("gemma4") / "model"))


@pytest.mark.parametrize("name", ["image", "wide_image", "video"])
def test_patches_of_gemma_4_are_its_processors_bit_by_bit(
    gemma4: Family, media: dict[str, Path], name: str
) -> None:
    """Theirs are filled with empty ones up to the most that there may be."""
    item, sampling = as_sent(media[name]), FrameSampling(num_frames=3)
    plan, suffix = gemma4.plan(item, sampling), "_videos" if name == "video" else ""
    frames = gemma4.frames(item, plan)
    if name == "video":
        frames = torch.cat([resize_image(frame, plan.size, 3) for frame in frames])
    theirs = gemma4.their_inputs([item], sampling)[f"pixel_values{suffix}"]
    each = plan.grid.h * plan.grid.w
    assert theirs.shape[:2] == (plan.num_frames, 70 * 9)
    assert torch.equal(gemma4.adapter.preprocess(frames, plan), theirs[:, :each].flatten(0, 1))
    assert not theirs[:, each:].any()


@pytest.mark.parametrize("tokens", [140, 280])
def test_a_limit_of_pixels_is_one_of_tokens_to_gemma_4(
    gemma4: Family, media: dict[str, Path], tokens: int
) -> None:
    """The most of 70 to 1,120 whose pixels, 144 each, lie within: transformers' `max_soft_tokens`."""
    item, limit = as_sent(media["wide_image"]), tokens * 144
    height, width = item.pixels.shape[:2]
    theirs = gemma4.processor.image_processor(item.pixels, max_soft_tokens=tokens, return_tensors="pt")
    (values,) = theirs["pixel_values"]
    given = load_adapter(gemma4.path, pixels=PixelSettings(max_pixels=limit, video_max_pixels=limit))
    for plan in (
        gemma4.adapter.plan_image(height, width, PixelLimits(max_pixels=2 * limit - 1)),
        given.plan_image(height, width),
    ):
        patches = gemma4.adapter.preprocess(gemma4.adapter.resize(item.pixels, plan), plan)
        assert torch.equal(patches, values[: len(patches)])
        assert not values[len(patches) :].any()
        assert given.plan_video(VideoFacts(4, 2.0, height, width), SAMPLING).size == plan.size


def test_gemma_4_refuses_in_one_line_what_it_cannot_do(gemma4: Family, tmp_path: Path) -> None:
    adapter = gemma4.adapter
    with pytest.raises(UnsupportedMediaError, match="hears nothing"):
        _ = adapter.audio
    with pytest.raises(MediaLimitError, match="picture of 9x0 pixels does not suit"):
        adapter.plan_image(0, 9)
    for limits, told in (
        (PixelLimits(max_pixels=999), "received 999 pixels .*allowed: at least 10,080, which are 70 tokens"),
        (PixelLimits(min_pixels=999), "min_pixels; allowed: max_pixels, pictures are enlarged"),
        (PixelLimits(size=(1, 99_999)), "size.shortest_edge; allowed: max_pixels"),
        (PixelLimits(max_pixels=10_081), "max_pixels 10,081; allowed: at most 10,080"),
    ):
        for kind in ("image", "video"):
            with pytest.raises(RequestError, match=told):
                adapter.check_pixels([(kind, limits)], None)  # type: ignore[list-item]
    adapter.check_pixels([("image", PixelLimits(max_pixels=10_081, is_low_detail=True))], 20_000)
    with pytest.raises(RequestError, match="999 pixels at most for a picture"):
        load_adapter(gemma4.path, pixels=PixelSettings(video_max_pixels=999))
    with pytest.raises(UnsupportedModelError, match="tower_share for a gemma4 model"):
        adapter.tower_merger(gemma4.tower, TowerMerge(0.5))
    shifted = changed(gemma4, tmp_path / "model", "video_processor", image_mean=[0.5] * 3)
    with pytest.raises(UnsupportedModelError, match=r"image_mean=\(0\.5, 0\.5, 0\.5\)"):
        load_adapter(shifted)


def test_a_model_that_hears_is_loaded_without_its_tower_for_sound(
    media: dict[str, Path], tmp_path: Path
) -> None:
    """As Gemma 4 E2B and E4B are published: transformers computes that tower by eager attention alone."""
    folder = build_gemma4(tmp_path / "model", hears=True)
    theirs = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held = {name.split(".")[1] for name, _ in theirs.named_parameters()}
    role = load_role(folder, "encode", CPU_FLOAT32).model
    assert {name.split(".")[1] for name, _ in role.named_parameters()} == held - {
        *("language_model", "audio_tower", "embed_audio"),
    }
    adapter, processor = load_adapter(folder), AutoProcessor.from_pretrained(folder, local_files_only=True)
    family, paths = Family("gemma4", folder, adapter, theirs, processor), [media["image"]]
    answer = ColocatedPipeline.load(folder).ask(paths, QUESTION, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(family, paths)
