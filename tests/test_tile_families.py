"""The pipeline over families that see tiles and single frames: tokens equal those of `model.generate` too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epd import video
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
    "video and image": ("video", "image"),
}
# The reference processor of SmolVLM does not take images and videos together.
PAIRS = {
    f"{name}-{case}": (name, names)
    for name in NAMES
    for case, names in CASES.items()
    if (name, case) != ("smolvlm", "video and image")
}
SAMPLING = FrameSampling(num_frames=6)


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family.load(
        request.param, BUILDERS[request.param](tmp_path_factory.mktemp("model") / request.param)
    )


def as_sent(path: Path) -> Media:
    """The whole image, or every frame of the video."""
    if video.media_kind(path) == "image":
        return Picture(torch.from_numpy(video.load_image(path)))
    info = video.probe(path)
    times_s = [(index + 0.5) / info.fps for index in range(info.num_frames)]
    return Clip(torch.from_numpy(reference_decode(path, times_s).data), info.fps)


@pytest.mark.parametrize("group_tokens", [1, 10_000], ids=["small groups", "one group"])
@pytest.mark.parametrize(("family", "names"), PAIRS.values(), ids=PAIRS, indirect=["family"])
def test_tokens_equal_generate(
    family: Family, media: dict[str, Path], names: tuple[str, ...], group_tokens: int
) -> None:
    paths = [media[name] for name in names]
    items = [as_sent(path) for path in paths]
    expected = generated(family.model, family.their_inputs(items, SAMPLING))

    pipeline = ColocatedPipeline.load(family.path, EngineConfig(group_tokens=group_tokens))
    answer = pipeline.ask(paths, QUESTION, num_frames=SAMPLING.num_frames, max_tokens=MAX_TOKENS)

    assert answer.token_ids == expected
