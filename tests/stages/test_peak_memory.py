"""The peak of live tensors: counted exactly, linear in the work, and what the analytic profiles compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configs
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as models

from epd.encoders import Adapter, FrameSampling, VideoFacts, load_adapter
from epd.encoders.families.qwen_tower import prepare_tower
from epd.encoders.groups import FrameEncoder, plan_groups
from epd.profiles.shapes import Transformer
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from epd.stages.profiling import peak_bytes
from tests.encoders.tiny_gemma import build_gemma4
from tests.encoders.tiny_generic import build_glm4v, build_qwen2_vl
from tests.encoders.tiny_tiles import build_video_llama_3

COMPRESSING = partial(build_video_llama_3, use_token_compression=True)


def chain(num_values: int) -> Callable[[], None]:
    """Holds one result, two, one, two: views and changes in place are no more memory."""

    def act() -> None:
        first = torch.zeros(num_values)
        second = first + 1
        del first
        view = second.view(-1)
        del second
        third = view + 1
        third.add_(1)

    return act


def test_only_what_lives_at_once_counts() -> None:
    assert peak_bytes(chain(1000)) == 2 * 4 * 1000
    assert peak_bytes(chain(3000)) == 3 * peak_bytes(chain(1000))
    kept = torch.zeros(500)
    assert peak_bytes(lambda: kept.add_(1)) == 0


def slope(run: Callable[[int], object], few: int, many: int) -> float:
    peaks = [peak_bytes(lambda num=num: run(num)) for num in (few, many)]  # type: ignore[misc]
    return (peaks[1] - peaks[0]) / (many - few)


@pytest.fixture
def half_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("half_precision")
def test_a_language_model_holds_what_the_catalogue_says() -> None:
    """Qwen2.5-VL's language model at an eighth of its width: the shares of the parts are the same."""
    shape = Transformer(2, 448, 28, 4, 16, 2368)
    config = configs.Qwen2_5_VLTextConfig(
        hidden_size=448,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=2368,
        num_hidden_layers=2,
        vocab_size=64,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    )
    model = models.Qwen2_5_VLTextModel(config).eval()
    with torch.inference_mode():
        found = slope(lambda num: model(inputs_embeds=torch.zeros(1, num, 448), use_cache=False), 64, 192)
    # Positions do not shrink with the width: 11 % here, 6 % at full width.
    assert found == pytest.approx(2 * shape.live_values_per_token, rel=0.15)


@pytest.mark.usefixtures("half_precision")
def test_a_tower_holds_what_the_catalogue_says() -> None:
    shape = Transformer(2, 192, 16, 16, 12, 512, is_in_place=True)
    config = configs.Qwen2_5_VLVisionConfig(
        depth=2,
        hidden_size=192,
        intermediate_size=512,
        num_heads=16,
        out_hidden_size=448,
        patch_size=5,
        fullatt_block_indexes=[1],
        attn_implementation="sdpa",
    )
    tower = prepare_tower(models.Qwen2_5_VisionTransformerPretrainedModel(config).eval())
    values_per_patch = 3 * 5**2 * 2

    def encode(num_patches: int) -> None:
        side = round(num_patches**0.5)
        tower(torch.zeros(num_patches, values_per_patch), grid_thw=torch.tensor([[1, side, side]]))

    with torch.inference_mode():
        found = slope(encode, 32**2, 64**2)  # more than are rotated together
    assert found == pytest.approx(2 * (shape.live_values_per_token + values_per_patch), rel=0.15)


@torch.inference_mode()
def held_of_a_video(adapter: Adapter, encoder: FrameEncoder, num_frames: int) -> int:
    """The most bytes that live while a video of a frame a second is looked at, preprocessed and encoded.

    Its embeddings are those of a group, which are sent away.
    """
    plan = adapter.plan_video(VideoFacts(num_frames, 1.0, 112, 112), FrameSampling(num_frames=num_frames))

    def act() -> None:
        parts = (torch.zeros(2, *plan.size, 3, dtype=torch.uint8) for _ in plan.times_s[::2])
        seen = adapter.compressed(plan, parts)
        for group in plan_groups([seen], [""], model="", group_tokens=64):
            frames = torch.zeros(group.num_frames, *plan.size, 3, dtype=torch.uint8)
            encoder.encode([encoder.patches(frames, group.plan)])

    return peak_bytes(act)


@pytest.mark.parametrize(
    ("build", "num_frames"),
    [(build_qwen2_vl, 600), (build_glm4v, 600), (build_gemma4, 100), (COMPRESSING, 600)],
)
def test_a_longer_video_holds_what_one_of_a_third_does(
    build: Callable[[Path], Path], num_frames: int, tmp_path: Path
) -> None:
    """Ten minutes and three, of a frame a second; of Gemma 4, whose frames cost most, fewer."""
    folder = build(tmp_path / "model")
    adapter = load_adapter(folder)
    encoder = FrameEncoder(adapter, adapter.vision_tower(load_role(folder, "encode", CPU_FLOAT32).model))
    short, long = (held_of_a_video(adapter, encoder, each) for each in (3 * num_frames // 10, num_frames))
    assert long <= 1.1 * short
