"""VideoLLaMA 3: frames of any size, each behind its time; tokens equal `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from epd import LLM
from epd.encoders import FrameSampling, VideoFacts, load_adapter
from epd.engine_config import EngineConfig
from epd.errors import RequestError
from epd.pixel_limits import PixelLimits
from epd.stages.decoder.decoder import FusedDecoder, decoder_of
from tests.colocated import ColocatedPipeline
from tests.encoders.tiny_tiles import build_video_llama_3
from tests.models.engine_answers import (
    test_answers_move_between_decode_workers,
    test_chunked_and_packed,
    test_preemption_changes_no_token,
    test_several_answers_share_their_prompt,
)
from tests.reference import MAX_TOKENS, generated_as_it_is, processor_inputs
from tests.stages.conftest import Subject, make
from tests.tiny_models import load_reference

__all__ = [
    "test_answers_move_between_decode_workers",
    "test_chunked_and_packed",
    "test_preemption_changes_no_token",
    "test_several_answers_share_their_prompt",
]

QUESTION = "What is shown? Ä, 漢"
SAMPLING = FrameSampling(num_frames=6)
TWO_OF_EACH = ("video", "image", "tall_video", "wide_image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_video_llama_3(tmp_path_factory.mktemp("video_llama") / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module")
def subject(folder: Path, media: dict[str, Path]) -> Subject:
    return make("video_llama_3", folder, media)


def expected(theirs: Any, folder: Path, paths: list[Path]) -> tuple[int, ...]:
    processor = AutoProcessor.from_pretrained(folder)
    return generated_as_it_is(theirs, processor_inputs(processor, paths, QUESTION, SAMPLING))


def test_two_of_each_equal_generate(theirs: Any, folder: Path, media: dict[str, Path]) -> None:
    paths = [media[name] for name in TWO_OF_EACH]
    pipeline = ColocatedPipeline.load(folder, EngineConfig(group_tokens=1))
    answer = pipeline.ask(paths, QUESTION, num_frames=6, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(theirs, folder, paths)


@pytest.mark.parametrize("topology", ["1epd", "1e1p1d"])
def test_answers_of_workers_and_from_their_caches(
    theirs: Any, folder: Path, media: dict[str, Path], topology: str
) -> None:
    paths = [media["video"], media["image"]]
    text = load_adapter(folder).tokenizer.decode(expected(theirs, folder, paths), skip_special_tokens=True)
    with LLM(folder, topology=topology, max_chunk_tokens=16, num_kv_tokens=4096) as llm:
        answers = [llm.ask(paths, QUESTION, frames=6, max_tokens=MAX_TOKENS).text for _ in range(2)]
    assert answers == [text] * 2


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
