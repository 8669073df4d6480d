"""The pipeline over families that see tiles and single frames: tokens equal those of `model.generate` too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from epd import LLM, video
from epd.encoders import FrameSampling
from epd.engine_config import EngineConfig
from tests.colocated import ColocatedPipeline
from tests.encoders.families import QUESTION, Clip, Family, Media, Picture
from tests.encoders.tiny_tiles import BUILDERS
from tests.reference import MAX_TOKENS, generated
from tests.video.plain_decoder import reference_decode

# transformers near 5.17 hands torch tensors to numpy in InternVL's processor, in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

NAMES = ("internvl", "llava_onevision", "smolvlm", "video_llama_3")
CASES = {
    "text": (),
    "image": ("image",),
    "images": ("wide_image", "image"),
    "video": ("video",),
    "videos": ("tall_video", "video"),
    "video and image": ("video", "image"),
}
# The reference processor of SmolVLM does not take images and videos together. Of two videos it says that both
# have as many frames as the longer one.
PAIRS = {
    f"{name}-{case}": (name, ("video", "video") if (name, case) == ("smolvlm", "videos") else names)
    for name in NAMES
    for case, names in CASES.items()
    if (name, case) != ("smolvlm", "video and image")
}
SAMPLING = FrameSampling(num_frames=6)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Each by name, loaded once. A fixture with these as parameters would load one for each test."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name: Family.load(name, BUILDERS[name](root / name)))


@pytest.fixture(scope="module")
def expected(families: Callable[[str], Family], media: dict[str, Path]) -> Callable[..., tuple[int, ...]]:
    """The tokens of `generate`, for a family and names of media."""

    @cache
    def answer(name: str, *names: str) -> tuple[int, ...]:
        inputs = families(name).their_inputs([as_sent(media[each]) for each in names], SAMPLING)
        return generated(families(name).model, inputs)

    return answer


def as_sent(path: Path) -> Media:
    """The whole image, or every frame of the video."""
    if video.media_kind(path) == "image":
        return Picture(torch.from_numpy(video.load_image(path)))
    info = video.probe(path)
    times_s = [(index + 0.5) / info.fps for index in range(info.num_frames)]
    return Clip(torch.from_numpy(reference_decode(path, times_s).data), info.fps)


@pytest.mark.parametrize("group_tokens", [1, 10_000], ids=["small groups", "one group"])
@pytest.mark.parametrize(("name", "names"), PAIRS.values(), ids=PAIRS)
def test_tokens_equal_generate(
    name: str,
    names: tuple[str, ...],
    group_tokens: int,
    families: Callable[[str], Family],
    expected: Callable[..., tuple[int, ...]],
    media: dict[str, Path],
) -> None:
    paths = [media[each] for each in names]
    pipeline = ColocatedPipeline.load(families(name).path, EngineConfig(group_tokens=group_tokens))
    answer = pipeline.ask(paths, QUESTION, num_frames=SAMPLING.num_frames, max_tokens=MAX_TOKENS)
    assert answer.token_ids == expected(name, *names)


@pytest.mark.parametrize("name", NAMES)
def test_handed_over_in_chunks(
    name: str,
    families: Callable[[str], Family],
    expected: Callable[..., tuple[int, ...]],
    media: dict[str, Path],
) -> None:
    family, asked = families(name), [names for each, names in PAIRS.values() if each == name]
    with LLM(family.path, topology="1e1p1d", max_chunk_tokens=16, num_kv_tokens=4096) as llm:
        answers = [handed_over(llm, [media[each] for each in names]) for names in asked]
    assert answers == [text_of(family, expected(name, *names)) for names in asked]


def handed_over(llm: LLM, paths: list[Path], question: str = QUESTION) -> str:
    """Returns the answer of workers about media, six frames of each video."""
    frames = SAMPLING.num_frames if any(video.media_kind(path) == "video" for path in paths) else None
    return llm.ask(paths, question, frames=frames, max_tokens=MAX_TOKENS).text


def text_of(family: Family, tokens: tuple[int, ...]) -> str:
    text: str = family.adapter.tokenizer.decode(tokens, skip_special_tokens=True)
    return text
