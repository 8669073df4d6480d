"""Shrunk checkpoints with the names and flags of published ones answer as transformers' `generate` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.workers import SplitPipeline
from epd.engine_config import EngineConfig
from epd.serve_app.worker.worker_settings import WorkerSettings
from tests.encoders.families import QUESTION, Clip, Family, Media, Picture
from tests.models.published import PUBLISHED
from tests.models.shrunk import build
from tests.positions import trained_positions_in
from tests.stages.encode.workers import SAMPLING, noise

NUM_TOKENS = 6

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@torch.inference_mode()
def generated(family: Family, media: list[Media]) -> list[int]:
    inputs: Any = family.their_inputs(media, SAMPLING)
    with trained_positions_in(family.model):
        sequence = family.model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=[]
        )
    tokens: list[int] = sequence[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def clip_of(family: Family) -> Clip:
    """Four seconds in the size that the model decodes at."""
    rough = Clip(torch.zeros(16, 96, 64, 3, dtype=torch.uint8), 4.0)
    height, width = family.plan(rough, SAMPLING).size
    return Clip(noise(16, height, width, 3), 4.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_equal_generate(name: str, tmp_path: Path) -> None:
    path = build(name, tmp_path)
    family = Family.load(PUBLISHED[name].config["model_type"], path)
    cases: dict[str, list[Media]] = {
        "text": [],
        "image": [Picture(noise(150, 170, 3, seed=1))],
        "video": [clip_of(family)],
    }
    settings = WorkerSettings(
        path, EngineConfig(device="cpu", dtype="float32", num_kv_tokens=4096), num_embeddings=4096
    )
    with SplitPipeline(settings, group_tokens=8) as ours:
        for case, media in cases.items():
            plans = [family.plan(item, SAMPLING) for item in media]
            frames = [family.frames(item, plan) for item, plan in zip(media, plans, strict=True)]
            answer = ours.ask(case, plans, frames, QUESTION, NUM_TOKENS)
            assert answer.in_order() == generated(family, media), case
