"""VideoLLaMA 3: frames of any size, each behind its time, without tokens that are as in the frame before.

Tokens equal `generate`; tests/test_tile_families.py shows it with all tokens of a video.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from epd import LLM
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.encoders.families.video_llama_3 import VideoLlama3Adapter
from epd.encoders.groups import prompt_identity
from epd.encoders.plans import MediaPlan
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.pixel_limits import PixelLimits
from epd.stages.decoder.decoder import FusedDecoder, decoder_of
from tests.colocated import ColocatedPipeline
from tests.encoders.families import Clip, Family
from tests.encoders.tiny_tiles import build_video_llama_3
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

SAMPLING = FrameSampling(num_frames=6)
CASES = (
    (),
    ("image",),
    ("wide_image", "image"),
    ("video",),
    ("video", "tall_video"),
    ("video", "image", "tall_video", "wide_image"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_video_llama_3(tmp_path_factory.mktemp("video_llama") / "model", use_token_compression=True)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def subject(folder: Path, media: dict[str, Path]) -> Subject:
    return make("video_llama_3", folder, media)


def expected(theirs: Any, folder: Path, paths: list[Path]) -> tuple[int, ...]:
    processor = AutoProcessor.from_pretrained(folder)
    return generated_as_it_is(theirs, processor_inputs(processor, paths, QUESTION, SAMPLING))


@pytest.mark.parametrize("names", CASES, ids="-".join)
def test_tokens_equal_generate(
    theirs: Any, folder: Path, media: dict[str, Path], names: tuple[str, ...]
) -> None:
    paths = [media[name] for name in names]
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    answer = pipeline.ask(paths, QUESTION, num_frames=6, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(theirs, folder, paths)


@pytest.fixture(scope="module")
def mixes(theirs: Any, folder: Path, media: dict[str, Path]) -> Mixes:
    asked = [[media[name] for name in names] for names in CASES]
    return [(paths, expected(theirs, folder, paths)) for paths in asked]


def still_in_part(seed: int) -> Clip:
    """Noise, of which frames keep parts: all, some columns, all but for a difference around the threshold."""
    draw = torch.Generator().manual_seed(seed)
    frames = [torch.randint(0, 256, (56, 84, 3), dtype=torch.uint8, generator=draw)]
    for at in range(1, 9):
        frame = frames[-1].clone()
        if at % 4:
            new = torch.randint(0, 256, frame.shape, dtype=torch.uint8, generator=draw)
            frame[:, : 28 * (at % 4 - 1)] = new[:, : 28 * (at % 4 - 1)]
            frame[: 4 * at, 70:] ^= 1
        frames.append(frame)
    return Clip(torch.stack(frames), 2.0)


@pytest.mark.parametrize("each", [1, 2, 4, 9])
def test_tokens_that_are_kept_are_the_processors(folder: Path, theirs: Any, each: int) -> None:
    """Whatever the parts that frames come in. A frame that shows nothing new keeps its first token."""
    processor, adapter = AutoProcessor.from_pretrained(folder), load_adapter(folder)
    family, clip, all_of_it = (
        Family("", folder, adapter, theirs, processor),
        still_in_part(0),
        FrameSampling(num_frames=9),
    )
    plan = family.plan(clip, all_of_it)
    assert plan.size == (56, 84)
    plan = adapter.compressed(plan, torch.split(clip.frames, each))
    inputs = family.their_inputs([clip], all_of_it)
    wanted = inputs["video_compression_mask"].numpy()
    assert np.frombuffer(b"".join(plan.kept), dtype=bool).tolist() == wanted.tolist()
    assert plan.unit_lengths[0] == plan.tokens_per_unit == 6
    assert plan.unit_lengths[4] == 1
    assert len(set(plan.unit_lengths)) > 3
    prompt = adapter.plan_prompt([plan], QUESTION)
    assert prompt.token_ids.tolist() == inputs["input_ids"][0].tolist()
    assert [unit.length for unit in prompt.media[0].units] == list(plan.unit_lengths)


def test_a_unit_is_known_by_the_tokens_that_it_keeps(folder: Path) -> None:
    adapter, clip = load_adapter(folder), still_in_part(0)
    plan = adapter.plan_video(clip.facts, FrameSampling(num_frames=9))
    plans = [adapter.compressed(plan, [frames]) for frames in (clip.frames, clip.frames.flip(2))]
    assert plans[0].unit_lengths == plans[1].unit_lengths
    prompts = [adapter.plan_prompt([each], QUESTION) for each in plans]
    one, two = (prompt_identity(prompt, ["a"]).rows for prompt in prompts)
    units = prompts[0].media[0].units
    assert one[units[0].offset].tolist() == two[units[0].offset].tolist()
    assert one[units[2].offset].tolist() != two[units[2].offset].tolist()


def test_a_video_is_looked_at_once_and_a_reduction_takes_the_place_of_it(
    folder: Path, media: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = list[MediaPlan](), VideoLlama3Adapter.compressed

    def counted(self: Any, plan: MediaPlan, parts: Iterable[torch.Tensor]) -> MediaPlan:
        looks.append(look(self, plan, parts))
        return looks[-1]

    monkeypatch.setattr(VideoLlama3Adapter, "compressed", counted)
    with LLM(folder, num_kv_tokens=4096) as llm:
        asked = [
            llm.ask([media["video"]], question, frames=6, max_tokens=2, retention=retention).usage
            for question, retention in ((QUESTION, 1.0), ("Why?", 1.0), (QUESTION, 0.5))
        ]
    assert len(looks) == 1
    (plan,) = looks
    assert [each.visual_tokens for each in asked[:2]] == [plan.num_tokens] * 2
    assert plan.num_tokens < plan.num_units * plan.tokens_per_unit
    assert asked[2].visual_tokens_before == plan.num_units * plan.tokens_per_unit
    assert 2 * asked[2].visual_tokens == asked[2].visual_tokens_before


def test_layers_are_ours(theirs: Any) -> None:
    assert isinstance(decoder_of(theirs, None), FusedDecoder)


def test_limits_of_a_video_are_of_all_frames_together(folder: Path) -> None:
    """As the processor's `size` has them, whose least pixels are of each frame."""
    adapter, facts = load_adapter(folder), VideoFacts(16, 2.0, 224, 224)
    sizes = [
        adapter.plan_video(facts, FrameSampling(num_frames=count), limits).size
        for count, limits in (
            (4, PixelLimits()),
            (16, PixelLimits()),
            (4, PixelLimits(size=(28**2, 4 * 28**2))),
        )
    ]
    assert sizes == [(112, 112), (56, 56), (28, 28)]
    for kind, limits in (
        ("video", PixelLimits(max_pixels=99)),
        ("image", PixelLimits(cap_pixels_per_frame=True)),
    ):
        with pytest.raises(RequestError, match="allowed: "):
            adapter.check_pixels([(kind, limits)], None)  # type: ignore[list-item]
