"""Families that transformers' own processor and tower can serve: tokens equal those of `model.generate`.

Of some an adapter of ours does, and nothing else differs.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from epd import LLM
from epd.encoders import Adapter, FrameSampling, VideoFacts, load_adapter
from epd.encoders.adapter import PatchRun
from epd.encoders.families.generic import GenericAdapter
from epd.encoders.families.measured_units import frames_per_unit
from epd.encoders.groups import prompt_identity
from epd.encoders.patches import resize_image
from epd.encoders.plans import MediaPlan
from epd.encoders.registry import ADAPTERS
from epd.encoders.sampling import sample_by_rule
from epd.engine_config import EngineConfig
from epd.errors import (
    MediaLimitError,
    RequestBudgetError,
    RequestError,
    UnsupportedMediaError,
    UnsupportedModelError,
)
from epd.kv.pass_limits import SchedulerConfig
from epd.models.families import FAMILIES, REFUSED
from epd.pixel_limits import PixelLimits
from epd.pixel_settings import PixelSettings
from epd.reduction import ReductionPolicy
from epd.sampling_params import SamplingParams
from epd.stages.engine.generation import GenerationSettings
from epd.types import PlaceholderRange, ceil_div
from tests.colocated import ColocatedPipeline
from tests.encoders.families import QUESTION, Clip, Family, Picture
from tests.encoders.tiny_generic import BUILDERS
from tests.encoders.tiny_tiles import BUILDERS as NATIVE
from tests.positions import expected_positions, trained_positions_in
from tests.reference import MAX_TOKENS, generated_as_it_is
from tests.serve_app.test_llm import encoded_groups
from tests.stages.conftest import Subject
from tests.stages.prompts import Drive, prompt_of
from tests.stages.split_deployment import GREEDY, Deployment
from tests.stages.test_moving import run_moving
from tests.test_tile_families import as_sent, handed_over, text_of
from tests.tiny_models import load_reference

GENERIC = {name: FAMILIES[name] for name in BUILDERS}
# tests/models/test_molmo.py compares such prompts of this one with transformers' layers.
# Its processor refuses two videos.
NOT_MIXED = {"molmo2"}
CASES = {
    "text": (),
    "image": ("image",),
    "images": ("wide_image", "image"),
    "video": ("video",),
    "videos": ("tall_video", "video"),
    "video and image": ("video", "image"),
}


def _kinds(media: tuple[str, ...]) -> list[str]:
    return [name.removeprefix("wide_").removeprefix("tall_") for name in media]


PAIRS = {
    f"{name}-{case}": (name, media)
    for name in BUILDERS
    for case, media in CASES.items()
    if set(_kinds(media)) <= set(GENERIC[name].takes)
    and not (name in NOT_MIXED and case in ("videos", "video and image"))
}
SAMPLING = FrameSampling(num_frames=6)
_expected: dict[tuple[Path, ...], tuple[int, ...]] = {}
_staged: dict[Path, Subject] = {}
BY_TRANSFORMERS = PixelSettings(model_impl="transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: {**BUILDERS, **NATIVE}[name](root / name))


@pytest.fixture(scope="module")
def families(folders: Callable[[str], Path]) -> Callable[[str], Family]:
    """Each by name, loaded once. A fixture with these as parameters would load one for each test."""
    return cache(lambda name: Family.load(name, folders(name)))


@pytest.fixture
def family(request: pytest.FixtureRequest, families: Callable[[str], Family]) -> Family:
    return families(request.param)


def expected(family: Family, media: list[Path]) -> tuple[int, ...]:
    """The tokens of `generate`, asked once for each prompt."""
    asked = (family.path, *media)
    if asked not in _expected:
        _expected[asked] = generated(family, media)
    return _expected[asked]


def generated(family: Family, media: list[Path], **settings: Any) -> tuple[int, ...]:
    inputs = inputs_for(family, media)
    with trained_positions_in(family.model), told_apart(family, inputs):
        return generated_as_it_is(family.model, inputs, **settings)


def told_apart(family: Family, inputs: Any) -> AbstractContextManager[Any]:
    """While open, rows of images and of a video go where GLM's processor says.

    Its model looks for both at all of their places, and refuses a prompt with both.
    """
    kinds = inputs.get("mm_token_type_ids")
    if not family.name.startswith("glm") or kinds is None:
        return nullcontext()
    masks = tuple((kinds == kind)[..., None] for kind in (1, 2))
    return mock.patch.object(family.model.model, "get_placeholder_mask", return_value=masks)


def inputs_for(family: Family, media: list[Path]) -> Any:
    return family.their_inputs([as_sent(each) for each in media], SAMPLING)


def test_every_family_that_is_listed_is_proven() -> None:
    generic = {name for name, each in FAMILIES.items() if each.impl == "transformers"}
    assert set(BUILDERS) == generic | (set(BUILDERS) & set(ADAPTERS))
    assert set(FAMILIES) - generic == set(ADAPTERS)
    assert not set(FAMILIES) & set(REFUSED)


@pytest.mark.parametrize(("family", "names"), PAIRS.values(), ids=PAIRS, indirect=["family"])
def test_tokens_equal_generate(family: Family, media: dict[str, Path], names: tuple[str, ...]) -> None:
    paths = [media[name] for name in names]
    pipeline = ColocatedPipeline.load(family.path, EngineConfig(group_tokens=1))
    answer = pipeline.ask(paths, QUESTION, num_frames=SAMPLING.num_frames, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(family, paths)


@pytest.mark.parametrize("family", ["qwen2_vl", "glm4v", "glm_ocr"], indirect=True)
def test_positions_are_those_of_training(family: Family, media: dict[str, Path]) -> None:
    paths = [media[name] for name in ("wide_image", "tall_video", "image", "video")]
    prompt = family.prompt([as_sent(each) for each in paths], SAMPLING)
    wanted = expected_positions(family.model, inputs_for(family, paths))
    assert (prompt.positions.tolist(), prompt.next_position) == wanted


@pytest.mark.parametrize("family", sorted(GENERIC), indirect=True)
def test_handed_over_in_chunks_and_from_the_cache(family: Family, media: dict[str, Path]) -> None:
    paths = [media["video" if "video" in GENERIC[family.name].takes else "wide_image"]]
    wanted = {
        case: expected(family, [media[name] for name in CASES[case]])
        for case in CASES
        if f"{family.name}-{case}" in PAIRS
    }
    text = text_of(family, expected(family, paths))
    with LLM(family.path, topology="1e1p1d", max_chunk_tokens=16, num_kv_tokens=4096) as llm:
        asked: dict[str, Any] = {"frames": SAMPLING.num_frames if paths == [media["video"]] else None}
        first = llm.ask(paths, QUESTION, max_tokens=MAX_TOKENS, **asked)
        num_groups = encoded_groups(llm)
        second = llm.ask(paths, QUESTION, max_tokens=MAX_TOKENS, **asked)
        assert encoded_groups(llm) == num_groups > 0
        answers = {case: handed_over(llm, [media[name] for name in CASES[case]]) for case in wanted}
    assert first.text == second.text == text
    assert answers == {case: text_of(family, tokens) for case, tokens in wanted.items()}


@pytest.mark.parametrize("family", sorted(GENERIC), indirect=True)
def test_preempted_both_ways_and_moved_between_decode_workers(family: Family, media: dict[str, Path]) -> None:
    subject = staged(family, media)
    prompt = max(subject.prompts, key=lambda each: len(each.plan))
    longest = len(prompt.plan)
    for mode in ("recompute", "offload"):
        config = SchedulerConfig(max_chunk_tokens=64, preemption=mode)
        engine = subject.engine(
            config=config, block_size=4, num_kv_tokens=2 * longest + 8, enable_prefix_caching=False
        )
        drive = Drive(engine, seed=0)
        for name in "abc":
            engine.add(prompt.request(name))
            for group in prompt.groups:
                engine.add_embeddings(name, group)
        while engine.has_work():
            drive.step()
        assert [drive.tokens(name) for name in "abc"] == [prompt.expected] * 3
        assert engine.scheduler.num_preempted > 0, "the pool was meant to be too small"
    deployment, prompts = Deployment(subject, 2, random.Random(0)), subject.mix(4)
    assert run_moving(deployment, prompts, GREEDY) > 0
    assert {name: deployment.tokens(name) for name in prompts} == {
        name: prompt.expected for name, prompt in prompts.items()
    }


@pytest.mark.parametrize("family", sorted(GENERIC), indirect=True)
def test_several_answers_share_their_prompt(family: Family, media: dict[str, Path]) -> None:
    subject = staged(family, media)
    prompt = max(subject.prompts, key=lambda each: len(each.plan))

    def answered(seed: int, num_answers: int) -> tuple[int, ...]:
        sampling = SamplingParams(max_tokens=6, temperature=1.0, n=num_answers)
        return Drive(subject.engine(), seed=0).run({"r": prompt}, sampling=sampling, seed=seed)["r"]

    assert answered(5, 2) == answered(5, 1) + answered(6, 1)


def staged(family: Family, media: dict[str, Path]) -> Subject:
    """The family with prompts for engines of ours, and a model whose attention may become ours; made once."""
    if family.path not in _staged:
        _staged[family.path] = _staged_anew(family, media)
    return _staged[family.path]


def _staged_anew(family: Family, media: dict[str, Path]) -> Subject:
    model, always = load_reference(family.path), {"min_new_tokens": MAX_TOKENS, "eos_token_id": []}
    clip = "video" if "video" in GENERIC[family.name].takes else "wide_image"
    prompts = []
    for names in ((), (clip,), ("image",)):
        paths = [media[name] for name in names]
        prompt = prompt_of(family.adapter, model, paths, QUESTION, SAMPLING, group_tokens=1)
        answer = generated(family, paths, **always)
        prompts.append(replace(prompt, expected=answer[: GREEDY.max_tokens]))
    return Subject(family.name, family.adapter, model, GenerationSettings(frozenset()), prompts)


@pytest.mark.parametrize("name", sorted({**BUILDERS, **NATIVE}))
def test_what_a_family_takes(folders: Callable[[str], Path], name: str) -> None:
    """Units of generic families are measured."""
    unit, adapter = FAMILIES[name].frames_per_unit, load_adapter(folders(name))
    with pytest.raises(UnsupportedMediaError, match="hears nothing"):
        _ = adapter.audio
    if unit is None:
        with pytest.raises(UnsupportedMediaError, match="allowed: image"):
            adapter.plan_video(VideoFacts(6, 2.0, 90, 120), SAMPLING)
        return
    plan = adapter.plan_video(VideoFacts(6, 2.0, 90, 120), SAMPLING)
    assert (plan.frames_per_unit, plan.num_units) == (unit, ceil_div(plan.num_frames, unit))
    assert not plan.is_joined_whole


@pytest.mark.parametrize("name", ["Glm4vVideoProcessor", "Glm46VVideoProcessor"])
def test_a_rule_that_knows_no_number_of_frames(name: str) -> None:
    """GLM-4.1V's knows a rate, GLM-4.6V's the length alone. Both say how many frames there are."""
    rule, video = getattr(transformers, name)(), VideoFacts(300, 30.0, 90, 120)
    metadata = transformers.video_utils.VideoMetadata(300, 30.0, duration=10.0)
    own = tuple(rule.sample_frames(metadata))
    assert sample_by_rule(rule, video, FrameSampling()) == own
    assert sample_by_rule(rule, video, FrameSampling(num_frames=5)) == own
    assert sample_by_rule(rule, video, FrameSampling(fps=0.7)) == tuple(rule.sample_frames(metadata, fps=0.7))
    if name == "Glm4vVideoProcessor":
        assert sample_by_rule(rule, video, FrameSampling(fps=1e30)) == tuple(range(300))
    with pytest.raises(RequestBudgetError):
        sample_by_rule(rule, video, FrameSampling(num_frames=5, max_frames=len(own) - 1))


def test_a_rate_comes_before_the_number_that_a_file_has() -> None:
    """Gemma 4's file has 32 frames, which transformers takes in the place of a rate, or refuses for 20."""
    rule, video = transformers.Gemma4VideoProcessor(), VideoFacts(20, 10.0, 90, 120)
    metadata = transformers.video_utils.VideoMetadata(20, 10.0, duration=2.0)
    at_rate = transformers.video_utils.default_sample_indices_fn(metadata, fps=2.0)
    assert sample_by_rule(rule, video, FrameSampling(fps=2.0)) == tuple(at_rate) == (0, 5, 10, 15)
    assert sample_by_rule(rule, video, FrameSampling()) == tuple(range(20))


def test_a_tower_that_mixes_frames_takes_a_video_whole(folders: Callable[[str], Path]) -> None:
    config = load_adapter(folders("llava_next_video")).checkpoint.config  # type: ignore[attr-defined]

    def mixed(_tower: Any, frames: torch.Tensor) -> torch.Tensor:
        return frames.float().flatten(1)[:, :8] + frames.float().mean()

    assert frames_per_unit(config, lambda _tower, frames: frames.float().flatten(1)[:, :8]) == 1
    assert frames_per_unit(config, mixed) is None


@pytest.mark.parametrize(
    ("family", "num_frames"), [("glm46v", 12), ("video_llama_3", 40)], indirect=["family"]
)
def test_frames_that_get_smaller_with_their_number_are_cut(family: Family, num_frames: int) -> None:
    """A unit alone would have more pixels: it is shown at the size of the whole."""
    draw = torch.Generator().manual_seed(0)
    clip = Clip(torch.randint(0, 256, (num_frames, 112, 112, 3), dtype=torch.uint8, generator=draw), 2.0)
    many = FrameSampling(num_frames=num_frames)
    plan = family.plan(clip, many)
    short = family.adapter.plan_video(VideoFacts(2, 2.0, 112, 112), FrameSampling(num_frames=2))
    assert math.prod(plan.size) < math.prod(short.size)
    assert plan.num_units * plan.frames_per_unit == num_frames
    theirs = family.their_inputs([clip], many)
    assert family.prompt([clip], many).token_ids.tolist() == theirs["input_ids"][0].tolist()
    frames = resize_image_of(clip, plan)
    with torch.inference_mode():
        runs = [
            PatchRun("video", family.adapter.preprocess(part, plan), plan.grid.cut(1))
            for part in torch.split(frames, plan.frames_per_unit)
        ]
        rows = torch.cat([each.rows for each in family.adapter.encode_batch(family.tower, runs)])
        names = ("pixel_values_videos", "video_grid_thw", "video_merge_sizes")
        whole = family.model.get_video_features(
            **{n: theirs[n] for n in names if n in theirs}, return_dict=True
        )
    torch.testing.assert_close(rows, torch.cat(list(whole.pooler_output)), rtol=1e-4, atol=1e-4)


def resize_image_of(clip: Clip, plan: MediaPlan) -> torch.Tensor:
    """Frames as a decoder hands them over, at the planned size."""
    return torch.cat([resize_image(frame, plan.size, 3) for frame in clip.frames[list(plan.frame_indices)]])


@pytest.mark.parametrize("family", ["glm46v", "qwen2_vl"], indirect=True)
def test_limits_of_pixels_hold(family: Family) -> None:
    """Images equal those of the processor with such a `size`; a limit of frames holds each of them."""
    native = family.adapter
    family = replace(family, adapter=load_adapter(family.path, pixels=BY_TRANSFORMERS))
    image = Picture(torch.zeros((150, 100, 3), dtype=torch.uint8))
    least = family.processor.image_processor.size["shortest_edge"]
    frames = 2 if family.name == "glm46v" else 1  # that an image is counted as
    sides = {"shortest_edge": least, "longest_edge": frames * least}
    theirs = family.their_inputs([image], SAMPLING, images_kwargs={"size": sides})
    small = PixelLimits(max_pixels=least)
    for adapter in (native, family.adapter):
        plan = adapter.plan_image(150, 100, small)
        assert plan.num_tokens < adapter.plan_image(150, 100).num_tokens
        assert adapter.plan_prompt([plan], QUESTION).token_ids.tolist() == theirs["input_ids"][0].tolist()
    clip = family.adapter.plan_video(VideoFacts(6, 2.0, 300, 400), SAMPLING, PixelLimits(max_pixels=1600))
    assert math.prod(clip.size) <= 1600
    assert (clip.num_units, clip.is_joined_whole) == (3, False)
    family.adapter.check_pixels([("image", small), ("video", small)], None)
    for kind, refused in (("image", PixelLimits(max_pixels=10**9)), ("video", PixelLimits(min_pixels=9))):
        with pytest.raises(RequestError, match="allowed"):
            family.adapter.check_pixels([(kind, refused)], None)


def test_reduction_and_static_frames_work_on_units(
    folders: Callable[[str], Path], media: dict[str, Path]
) -> None:
    pipeline = ColocatedPipeline.load(folders("llava_next_video"), EngineConfig(skip_static=0.0))
    whole = pipeline.ask([media["video"]], QUESTION, num_frames=6, max_tokens=4)
    half = ReductionPolicy(retention=0.5)
    reduced = pipeline.ask([media["video"]], QUESTION, num_frames=6, max_tokens=4, reduction=half)
    assert reduced.usage.visual_tokens * 2 == whole.usage.visual_tokens


@pytest.mark.parametrize("name", ["internvl", "qwen2_5_vl", "qwen2_vl", "glm4v"])
def test_a_native_family_by_transformers(
    folders: Callable[[str], Path], media: dict[str, Path], name: str
) -> None:
    family = Family.load(name, folders(name))
    assert not isinstance(family.adapter, GenericAdapter)
    pipeline = ColocatedPipeline.load(family.path, EngineConfig(model_impl="transformers"))
    assert isinstance(pipeline.adapter, GenericAdapter)
    answer = pipeline.ask([media["image"]], QUESTION, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(family, [media["image"]])


@pytest.mark.parametrize(("model_type", "impl"), [("llava", "native"), ("florence2", "auto")])
def test_a_family_without_an_adapter_says_what_to_try(tmp_path: Path, model_type: str, impl: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(UnsupportedModelError, match="--model-impl transformers"):
        load_adapter(tmp_path, pixels=PixelSettings(model_impl=impl))


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_would_answer_wrongly_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for pixels in (PixelSettings(), BY_TRANSFORMERS):
        with pytest.raises(UnsupportedModelError, match=REFUSED[model_type][:20]):
            load_adapter(tmp_path, pixels=pixels)


def test_a_model_without_images_is_refused(folders: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("llava"), tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="get_image_features"):
        load_adapter(folder, pixels=BY_TRANSFORMERS)


def test_runs_of_an_image_have_names_of_their_own(folders: Callable[[str], Path]) -> None:
    """Else a second row of an image could be taken for its first one in the prefix cache."""
    adapter = load_adapter(folders("mistral3"))
    prompt = adapter.plan_prompt([adapter.plan_image(112, 112)], QUESTION)
    (item,) = prompt.media
    assert len(item.units) == 4
    assert item.plan.is_joined_whole
    assert item.range_of(0) == PlaceholderRange(
        item.units[0].offset, prompt.prefix_length - item.units[0].offset
    )
    assert len(item.token_indices(0, 1)) == item.num_tokens == item.plan.num_tokens
    rows = prompt_identity(prompt, ["a"]).rows
    names = {tuple(rows[unit.offset].tolist()) for unit in item.units}
    assert len(names) == len(item.units)
    with pytest.raises(ValueError, match="joined whole need as many"):
        replace(item, units=item.units[1:])


def test_a_first_token_that_the_template_writes_is_not_added_again(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders("llava"), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    tokenizer.bos_token = first[0]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first[0]} $A", special_tokens=[first]
    )
    tokenizer.save_pretrained(folder)
    template = folder / "chat_template.jinja"
    for begins in ("", first[0]):
        template.write_text(begins + (folders("llava") / template.name).read_text())
        prompt = load_adapter(folder).plan_prompt((), QUESTION)
        assert prompt.token_ids[0] == first[1]
        assert prompt.token_ids.tolist().count(first[1]) == 1


def test_images_that_show_nothing(folders: Callable[[str], Path]) -> None:
    adapter: Adapter = load_adapter(folders("llava"))
    with pytest.raises(MediaLimitError, match="0x9"):
        adapter.plan_image(9, 0)
    with pytest.raises(MediaLimitError, match="crop it"):
        load_adapter(folders("qwen2_vl")).plan_image(1, 5000)
