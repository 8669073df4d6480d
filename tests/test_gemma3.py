"""Gemma 3 from files on: its images, its prompts, its answers over workers, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from epd import LLM
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.families.generic import GenericAdapter
from epd.engine_config import EngineConfig
from epd.errors import UnsupportedMediaError, UnsupportedModelError
from tests.colocated import ColocatedPipeline
from tests.encoders.families import QUESTION, Family
from tests.encoders.tiny_gemma import IMAGE_TOKENS, build_gemma3
from tests.reference import MAX_TOKENS, generated_as_it_is
from tests.stages.conftest import as_sent

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
    paths = [media["wide_image"], media["image"]]
    text = family.adapter.tokenizer.decode(expected(family, paths), skip_special_tokens=True)
    with LLM(family.path, topology="1e1p1d", max_chunk_tokens=16, num_kv_tokens=4096) as llm:
        answers = [llm.ask(paths, QUESTION, max_tokens=MAX_TOKENS).text for _ in range(2)]
    assert answers == [text, text]


def test_videos_and_sound_are_refused_in_one_line(family: Family) -> None:
    with pytest.raises(UnsupportedMediaError, match="hears nothing"):
        _ = family.adapter.audio
    with pytest.raises(UnsupportedMediaError, match="a video for a gemma3 model; allowed: images and text"):
        family.adapter.plan_video(VideoFacts(6, 2.0, 90, 120), SAMPLING)


def test_images_that_are_cut_are_refused(family: Family, tmp_path: Path) -> None:
    folder = shutil.copytree(family.path, tmp_path / "model")
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["image_processor"]["do_pan_and_scan"] = True
    path.write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="do_pan_and_scan=True"):
        load_adapter(folder)
