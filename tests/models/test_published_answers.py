"""Tokens equal `generate` with published processor files and a real tokenizer, on the default path.

Weights are tiny and random; pictures, tiles and templates are as published. The first has all 151,643 tokens,
the others the most common ones. Frames are larger than
the authors' limits, so that both must make them smaller.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tvf

from benchmarks.gpu.workers import SplitPipeline
from epd.encoders import FrameSampling, MediaPlan
from epd.encoders.sampling import DEFAULT_FPS
from epd.engine_config import EngineConfig
from epd.serve_app.worker.worker_settings import WorkerSettings
from tests.encoders.families import QUESTION, Clip, Family, Media, Picture
from tests.models.published import PUBLISHED
from tests.models.real_tokenizer import qwen_tokenizer, qwen_words
from tests.models.shrunk import build_with_published_files
from tests.positions import trained_positions_in
from tests.stages.encode.workers import noise

NUM_TOKENS = 6
CHECKPOINTS = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "InternVL3-8B", "LLaVA-OneVision-7B", "SmolVLM2-256M")
AS_EVER = FrameSampling()
# What transformers' processor must be told to hold frames to the authors' limits.
LIMITS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "size": {"shortest_edge": 56 * 56, "longest_edge": 768 * 28 * 28},
        "cap_pixels_per_frame": True,
    },
    "qwen3_vl": {"cap_pixels_per_frame": True},
}
LARGE = Clip(noise(8, 720, 1280, 3), 4.0)
# As the model decodes it: SmolVLM gets frames as they are.
SMALL = Clip(noise(8, 96, 128, 3), 4.0)

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


def frames_of(family: Family, item: Media, plan: MediaPlan) -> torch.Tensor:
    """uint8 [N, h, w, 3], resized as the processors resize."""
    frames = family.frames(item, plan)
    if plan.kind == "image" or frames.shape[1:3] == plan.size:
        return frames
    resized = tvf.resize(
        frames.permute(0, 3, 1, 2), list(plan.size), interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    return resized.permute(0, 2, 3, 1)


@torch.inference_mode()
def generated(family: Family, media: list[Media]) -> list[int]:
    has_video = any(isinstance(item, Clip) for item in media)
    rate = DEFAULT_FPS if has_video and family.processor.video_processor.fps is None else None
    inputs: Any = family.their_inputs(
        media, FrameSampling(rate), **(LIMITS.get(family.name, {}) if has_video else {})
    )
    with trained_positions_in(family.model):
        sequence = family.model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=[]
        )
    tokens: list[int] = sequence[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_equal_generate(name: str, tmp_path: Path) -> None:
    tokenizer = qwen_tokenizer if name == CHECKPOINTS[0] else qwen_words
    path = build_with_published_files(name, tmp_path, tokenizer)
    family = Family.load(PUBLISHED[name].config["model_type"], path)
    cases: dict[str, list[Media]] = {
        "text": [],
        "image": [Picture(noise(150, 170, 3, seed=1))],
        "video": [SMALL if family.name == "smolvlm" else LARGE],
    }
    settings = WorkerSettings(
        path, EngineConfig(device="cpu", dtype="float32", num_kv_tokens=8192), num_embeddings=8192
    )
    with SplitPipeline(settings, group_tokens=512) as ours:
        for case, media in cases.items():
            plans = [family.plan(item, AS_EVER) for item in media]
            frames = [frames_of(family, item, plan) for item, plan in zip(media, plans, strict=True)]
            answer = ours.ask(case, plans, frames, QUESTION, NUM_TOKENS)
            assert answer.in_order() == generated(family, media), case
