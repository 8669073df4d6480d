"""MiniCPM-V: an overview and slices of another size in one plan, of images and of frames.

Tokens equal `generate`; tests/test_generic_families.py shows it with whole frames, as the authors advise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoProcessor

from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.adapter import PatchRun
from epd.encoders.families import qwen_tower
from epd.encoders.families.minicpmv import MiniCPMVAdapter
from epd.encoders.groups import plan_groups, prompt_identity
from epd.encoders.reduction.reading import reduce_prompt
from epd.engine_config import EngineConfig
from epd.errors import MediaLimitError, RequestError, UnsupportedModelError
from epd.pixel_limits import PixelLimits
from epd.reduction import ReductionPolicy
from epd.serve_app.verification import verify
from epd.stages.decoder.decoder import FusedDecoder, decoder_of
from epd.stages.profiled_media import _Pictures
from tests.colocated import ColocatedPipeline
from tests.encoders.families import Family, Picture
from tests.encoders.tiny_minicpm import build_minicpmv4_6, build_minicpmv4_7
from tests.media import write_image, write_video
from tests.models.engine_answers import (
    QUESTION,
    Mixes,
    test_answers_move_between_decode_workers,
    test_answers_of_workers_and_from_their_caches,
    test_chunked_and_packed,
    test_epd_verify_says_equal,
    test_preemption_changes_no_token,
    test_several_answers_share_their_prompt,
)
from tests.reference import MAX_TOKENS, generated_as_it_is, processor_inputs
from tests.stages.conftest import Subject, make
from tests.tiny_models import load_reference

__all__ = [
    "test_answers_move_between_decode_workers",
    "test_answers_of_workers_and_from_their_caches",
    "test_chunked_and_packed",
    "test_epd_verify_says_equal",
    "test_preemption_changes_no_token",
    "test_several_answers_share_their_prompt",
]

# Of transformers' processor, which hands tensors to numpy in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

SAMPLING, FACTS = FrameSampling(num_frames=6), VideoFacts(60, 10.0, 90, 160)
HALF = ReductionPolicy(retention=0.5)
BUILDERS: Mapping[str, Callable[[Path], Path]] = {
    "4.6": partial(build_minicpmv4_6, cuts_frames=True),
    "4.7": partial(build_minicpmv4_7, cuts_frames=True),
    "4.7 in mode 4x": partial(build_minicpmv4_7, cuts_frames=True, mode="4x"),
}
CASES = (
    ("small_image",),
    ("image",),
    ("video", "tall_video"),
    ("video", "image", "small_image", "tall_video", "wide_image"),
)
PAIRS = [(version, names) for version in ("4.6", "4.7") for names in CASES]
PAIRS += [("4.7 in mode 4x", ("video", "image"))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("minicpm")
    return {name: build(root / name) for name, build in BUILDERS.items()}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["4.7"]


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: load_reference(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def sent(media: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With an image that has no slices."""
    small = write_image(tmp_path_factory.mktemp("media") / "small.png", height=40, width=60, seed=3)
    return media | {"small_image": small}


@pytest.fixture(scope="module")
def subject(folder: Path, media: dict[str, Path]) -> Subject:
    return make("minicpmv4_7", folder, media)


def expected(model: Any, folder: Path, paths: list[Path]) -> tuple[int, ...]:
    processor = AutoProcessor.from_pretrained(folder)
    return generated_as_it_is(model, processor_inputs(processor, paths, QUESTION, SAMPLING))


@pytest.fixture(scope="module")
def mixes(theirs: dict[str, Any], folder: Path, sent: dict[str, Path]) -> Mixes:
    asked = [[sent[name] for name in names] for names in CASES]
    return [(paths, expected(theirs["4.7"], folder, paths)) for paths in asked]


@pytest.mark.parametrize(("version", "names"), PAIRS, ids=str)
def test_tokens_equal_generate(
    theirs: dict[str, Any],
    folders: dict[str, Path],
    sent: dict[str, Path],
    version: str,
    names: tuple[str, ...],
) -> None:
    paths = [sent[name] for name in names]
    pipeline = ColocatedPipeline.load(folders[version], EngineConfig(group_tokens=1))
    assert isinstance(pipeline.adapter, MiniCPMVAdapter)
    answer = pipeline.ask(paths, QUESTION, num_frames=6, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(theirs[version], folders[version], paths)


def test_verify_sends_frames_as_they_were(folder: Path, tmp_path: Path) -> None:
    """At the planned size, 56 x 112 pixels, the processor would cut slices of them."""
    small = write_video(tmp_path / "small.mp4", num_frames=20, height=54, width=96)
    plan = load_adapter(folder).plan_video(VideoFacts(20, 10.0, 54, 96), SAMPLING)
    assert (plan.size, plan.grid.num_tiles) == ((56, 112), 1)
    assert load_adapter(folder).plan_video(VideoFacts(20, 10.0, *plan.size), SAMPLING).grid.num_tiles == 3
    assert [report.is_equal for report in verify(folder, [small])] == [True] * 2


def test_layers_are_ours(theirs: dict[str, Any]) -> None:
    assert isinstance(decoder_of(theirs["4.7"], None), FusedDecoder)


def test_a_video_with_slices_flows_frame_by_frame(folder: Path) -> None:
    """Each tile of a frame has a range and a name of its own; a shorter look shares its frames' names."""
    adapter = load_adapter(folder)
    plan, short = (
        adapter.plan_video(replace(FACTS, num_frames=frames), FrameSampling()) for frames in (60, 20)
    )
    assert (plan.num_units, plan.grid.num_tiles, plan.is_joined_whole) == (6, 3, False)
    groups = plan_groups([plan], ["a"], model="m", group_tokens=1)
    assert [(group.start, group.stop) for group in groups] == [(unit, unit + 1) for unit in range(6)]
    assert {group.spec.num_embeddings for group in groups} == {plan.tokens_per_unit}
    assert sum(group.spec.num_patches for group in groups) == plan.grid.num_patches
    prompts = [adapter.plan_prompt([each], QUESTION) for each in (plan, short)]
    (item,) = prompts[0].media
    assert len(item.units) == 18
    assert item.range_of(1).offset == item.units[3].offset
    assert item.range_of(1).stop == item.units[5].stop
    assert [item.unit_run(index) for index in (2, 3)] == [(0, 1), (1, 2)]
    assert len(item.token_indices(1, 3)) == 2 * plan.tokens_per_unit
    assert item.token_indices(1, 3)[0] == item.units[3].offset
    one, two = (prompt_identity(prompt, ["a"]).rows for prompt in prompts)
    assert len({tuple(one[unit.offset].tolist()) for unit in item.units}) == 18
    assert one[: item.units[5].stop].tolist() == two[: item.units[5].stop].tolist()
    with pytest.raises(ValueError, match="18 units need"):
        replace(item, units=item.units[1:])


def test_whole_frames_may_be_reduced_and_sliced_ones_stay(folders: dict[str, Path]) -> None:
    adapter = load_adapter(folders["4.6"])
    sizes = [(40, 60), (90, 120)]
    plans = [adapter.plan_video(replace(FACTS, height=h, width=w), SAMPLING) for h, w in sizes]
    kept = [reduce_prompt(adapter.plan_prompt([plan], QUESTION), HALF) for plan in plans]
    shares = [each.num_visual_tokens / plan.num_tokens for each, plan in zip(kept, plans, strict=True)]
    assert shares == [0.5, 1.0]


def test_a_layer_attends_once_for_each_size_of_a_tile(folder: Path) -> None:
    family, frames = Family.load("minicpmv4_7", folder), torch.zeros(3, 90, 160, 3, dtype=torch.uint8)
    plan = family.adapter.plan_video(FACTS, SAMPLING).part(0, 3)
    run = PatchRun("video", family.adapter.preprocess(frames, plan), plan.grid)
    attend = qwen_tower.scaled_dot_product_attention
    with (
        torch.inference_mode(),
        patch.object(qwen_tower, "scaled_dot_product_attention", wraps=attend) as attention,
        patch.object(
            torch.nn.functional, "scaled_dot_product_attention", side_effect=AssertionError("other")
        ),
    ):
        family.adapter.encode_batch(family.tower, [run])
    assert attention.call_count == 2 * len(family.tower.vision_tower.encoder.layers) + 1  # type: ignore[union-attr,arg-type]


def test_an_image_in_low_detail_has_no_slices(folder: Path) -> None:
    family, low = Family.load("minicpmv4_7", folder), PixelLimits(is_low_detail=True)
    image = Picture(torch.zeros(100, 76, 3, dtype=torch.uint8))
    family.adapter.check_pixels([("image", low)], None)
    plans = [family.adapter.plan_image(100, 76, limits) for limits in (low, PixelLimits())]
    whole = family.their_inputs([image], SAMPLING, images_kwargs={"slice_mode": False})
    assert [plan.grid.num_tiles for plan in plans] == [1, 3]
    assert [plan.resized for plan in plans] == [(84, 56), (112, 84)]
    ids = family.adapter.plan_prompt([plans[0]], QUESTION).token_ids
    assert ids.tolist() == whole["input_ids"][0].tolist()


def test_a_profile_knows_its_tiles(folder: Path) -> None:
    rule = _Pictures(load_adapter(folder)).rule()
    assert (rule.kind, rule.patch, rule.max_tiles) == ("tiles", 7, 4)
    assert (rule.tile_patches, rule.tile_tokens) == (144, 9)
    assert (rule.video_fps, rule.max_frames) == (1.0, 128)


def test_what_it_cannot_do_is_refused_in_one_line(folder: Path) -> None:
    adapter: Any = load_adapter(folder)
    for shape in ((0, 5), (5, 0)):
        with pytest.raises(MediaLimitError, match="crop it first"):
            adapter.plan_image(*shape)
    with pytest.raises(RequestError, match="one frame a second"):
        adapter.plan_video(FACTS, FrameSampling(fps=2.0))
    with pytest.raises(RequestError, match="max_pixels; allowed: none"):
        adapter.check_pixels([("image", PixelLimits(max_pixels=9))], None)


@pytest.mark.parametrize(
    "change",
    [{"downsample_mode": "4x"}, {"merger_times": 2}, {"merge_kernel_size": [4, 4]}, {"insert_layer_id": -1}],
    ids=str,
)
def test_another_tower_is_refused(folder: Path, change: dict[str, Any]) -> None:
    checkpoint = load_adapter(folder).checkpoint  # type: ignore[attr-defined]
    config = AutoConfig.from_pretrained(folder)
    config.update(change)
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(change))}|kernels"):
        MiniCPMVAdapter(replace(checkpoint, config=config))
    checkpoint.processor.video_processor.resample = 2
    with pytest.raises(UnsupportedModelError, match="bicubic"):
        MiniCPMVAdapter(checkpoint)
