"""Checkpoints of every family, and what `generate` answers to a mix of prompts at trained positions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from epd import video
from epd.encoders import Adapter, FrameSampling, load_adapter
from epd.stages.engine.engine import LanguageEngine
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.setup import build_engine
from tests.draws import same_draws
from tests.encoders.conftest import families, family, tiled_or_not
from tests.encoders.families import Clip, Family, Media, Picture
from tests.encoders.tiny_gemma import GEMMA4_EXPERTS, GEMMA4_SMALL, build_gemma3, build_gemma4
from tests.encoders.tiny_generic import build_glm4v, build_glm4v_moe, build_qwen3_5_moe
from tests.encoders.tiny_minicpm import build_minicpmv4_7
from tests.encoders.tiny_tiles import BUILDERS
from tests.engine_options import parted
from tests.positions import trained_positions_in
from tests.reference import processor_inputs
from tests.stages.prompts import MAX_TOKENS, QUESTIONS, Drive, Prompt, prompt_of
from tests.tiny_models import load_reference
from tests.video.plain_decoder import reference_decode

__all__ = ["families", "family", "same_draws", "tiled_or_not"]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "smolvlm", "shapes-vl")
# Whose layers have a recurrent state, with experts too.
RECURRENT = ("qwen3_5", "qwen3_5_moe")
# Whose layers have sliding windows; of Gemma 4, with heads of two sizes, with layers that attend the keys of
# others and have embeddings of their own, and with experts beside the MLP.
WINDOWED = ("gemma3", "gemma4", "gemma4_small", "gemma4_experts")
# Whose layers have norms behind attention and MLP, and heads that are rotated in part; with experts too.
GLM = ("glm4v", "glm4v_moe")
# Of both kinds two rounds, which cost half of what twelve do.
_SIX: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
}
BUILDERS_HERE = BUILDERS | {
    "qwen3_5_moe": build_qwen3_5_moe,
    "glm4v": build_glm4v,
    "glm4v_moe": build_glm4v_moe,
    "gemma3": build_gemma3,
    "minicpmv4_7": partial(build_minicpmv4_7, cuts_frames=True),
    "gemma4": partial(build_gemma4, **_SIX),
    "gemma4_small": partial(build_gemma4, **_SIX, **GEMMA4_SMALL | {"num_kv_shared_layers": 2}),
    "gemma4_experts": partial(build_gemma4, seed=1, **_SIX, **GEMMA4_EXPERTS),
}
SAMPLING = FrameSampling(num_frames=6)
# Of Gemma 4, whose frames have up to 70 tokens: two are far longer than its windows.
FEW = FrameSampling(num_frames=2)
MIX: tuple[tuple[str, ...], ...] = ((), ("image",), ("video",), ("wide_image", "image"), ("tall_video",))
# Of a family that sees no videos.
IMAGES: tuple[tuple[str, ...], ...] = (
    (),
    ("image",),
    ("wide_image", "image"),
    ("image", "wide_image", "image"),
)


@dataclass(slots=True)
class Subject:
    """One checkpoint: what it must answer, and the model to build engines on."""

    name: str
    adapter: Adapter
    model: Any
    settings: GenerationSettings
    prompts: list[Prompt]

    def engine(self, **options: Any) -> LanguageEngine:
        """options: of `build_engine`, and fields of an engine's record."""
        config, others = parted({"num_kv_tokens": 8192} | options)
        return build_engine(self.model, self.adapter, self.settings, options=config, **others)

    def mix(self, count: int) -> dict[str, Prompt]:
        """The first `count` prompts, again from the start when there are not as many."""
        return {f"r{i}": self.prompts[i % len(self.prompts)] for i in range(count)}


def check(subject: Subject, drive: Drive, count: int) -> None:
    """All requests of the mix get the tokens of `generate`, and nothing is left behind."""
    prompts = subject.mix(count)
    tokens = drive.run(prompts)
    assert tokens == {name: prompt.expected for name, prompt in prompts.items()}
    assert drive.engine.kv.usage == 0


@pytest.fixture(scope="session")
def subjects(
    checkpoints: dict[str, Path], media: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Subject]:
    """Each family by name, made when it is first asked for."""
    made: dict[str, Subject] = {}

    def get(name: str) -> Subject:
        if name not in made:
            folder = tmp_path_factory.mktemp("engine")
            path = checkpoints[name] if name in checkpoints else BUILDERS_HERE[name](folder / name)
            made[name] = make(name, path, media)
        return made[name]

    return get


@pytest.fixture(params=FAMILIES)
def any_family(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def a_family(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    """Two are enough where nothing depends on the family: with M-RoPE, with and without deepstack."""
    return subjects(request.param)


@pytest.fixture(params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


@pytest.fixture(params=[*WINDOWED, *RECURRENT, *GLM])
def other_layers(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    """With sliding windows, with a recurrent state, or with norms behind."""
    return subjects(request.param)


@pytest.fixture
def windowed(subjects: Callable[[str], Subject]) -> Subject:
    return subjects("gemma3")


def make(name: str, path: Path, media: dict[str, Path]) -> Subject:
    adapter, model = load_adapter(path), load_reference(path)
    processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    family = Family(name, path, adapter, model, processor)
    settings = GenerationSettings(eos_ids=frozenset())  # every answer is as long as may be
    prompts = []
    for index, names in enumerate(IMAGES if name == "gemma3" else MIX):
        paths = [media[each] for each in names]
        question = QUESTIONS[index % len(QUESTIONS)]
        sampling = FEW if name.startswith("gemma4") else SAMPLING
        prompt = prompt_of(adapter, model, paths, question, sampling, group_tokens=1 if index % 2 else 20)
        prompts.append(replace(prompt, expected=expected(family, paths, question, sampling)))
    return Subject(name, adapter, model, settings, prompts)


@torch.inference_mode()
def expected(
    family: Family, paths: list[Path], question: str, sampling: FrameSampling = SAMPLING
) -> tuple[int, ...]:
    """The truth: transformers' processor and `generate`, before the model's attention becomes ours."""
    inputs = inputs_of(family, paths, question, sampling)
    with trained_positions_in(family.model):
        sequences = family.model.generate(
            **inputs, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=[]
        )
    return tuple(sequences[0, inputs["input_ids"].shape[1] :].tolist())


def inputs_of(family: Family, paths: list[Path], question: str, sampling: FrameSampling = SAMPLING) -> Any:
    if family.name in BUILDERS and not family.name.startswith("qwen"):
        return family.their_inputs([as_sent(path) for path in paths], sampling, question)
    with (
        warnings.catch_warnings()
    ):  # GLM's processor and MiniCPM-V's make arrays of tensors in ways that numpy 2 regrets
        warnings.filterwarnings("ignore", "__array_(_ implementation|wrap__)", DeprecationWarning)
        return processor_inputs(family.processor, paths, question, sampling)


def as_sent(path: Path) -> Media:
    """The whole image, or every frame of the video."""
    if video.media_kind(path) == "image":
        return Picture(torch.from_numpy(video.load_image(path)))
    info = video.probe(path)
    times_s = [(index + 0.5) / info.fps for index in range(info.num_frames)]
    return Clip(torch.from_numpy(reference_decode(path, times_s).data), info.fps)
