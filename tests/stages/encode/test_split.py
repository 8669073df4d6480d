"""Encoders with vision weights alone and a language model with its own alone answer as the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epd.encoders.groups import plan_groups, prompt_identity
from epd.engine_config import EngineConfig
from epd.sampling_params import SamplingParams
from epd.stages.encode.encoder_pool import EmbeddingSplicer
from epd.stages.engine.generation import GenerateRequest, GenerationSettings
from epd.stages.engine.setup import build_engine
from epd.stages.loading.weights import load_role
from epd.stages.placement import CPU_FLOAT32
from tests.encoders.families import QUESTION, Family, Media, Picture
from tests.positions import trained_positions_in
from tests.stages.encode.sharded_encoding import ShardedEncoding
from tests.stages.encode.workers import SAMPLING, Workers, clip_of, noise

NUM_TOKENS = 8

# transformers near 5.17 hands torch tensors to numpy in InternVL's processor, in a way that numpy 2 regrets.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")


@torch.inference_mode()
def answer(family: Family, media: list[Media], num_encoders: int) -> list[int]:
    """Greedy tokens of the split pipeline: sharded encoding, transfer, prefill group by group, decode."""
    encode = load_role(family.path, "encode", CPU_FLOAT32).model
    language = load_role(family.path, "language", CPU_FLOAT32).model
    workers = Workers(
        Family(family.name, family.path, family.adapter, encode, family.processor), num_encoders
    )
    plans = [family.plan(item, SAMPLING) for item in media]
    hashes = [f"item {index}" for index in range(len(media))]
    groups = plan_groups(plans, hashes, model="tiny", group_tokens=8)
    prompt = family.adapter.plan_prompt(plans, QUESTION)
    options = EngineConfig(num_kv_tokens=4096)
    engine = build_engine(language, family.adapter, GenerationSettings(frozenset()), options=options)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    engine.add(GenerateRequest("r", prompt, prompt_identity(prompt, hashes), sampling))
    encoded = ShardedEncoding(workers.encoders, workers.receiver).encode(
        "r", groups, lambda group: workers.frames(media, group)
    )
    outputs = []
    splicer = EmbeddingSplicer(family.adapter, prompt)
    for group, embeddings in encoded:
        placed = splicer.push(group, embeddings)
        if placed is not None:
            engine.add_embeddings("r", placed)
            outputs += engine.step().outputs
    while engine.has_work():
        outputs += engine.step().outputs
    return [output.token.token_id for output in outputs]


@pytest.mark.parametrize("num_encoders", [1, 3])
@pytest.mark.parametrize("kind", ["images", "video"])
def test_the_split_pipeline_gives_the_tokens_of_generate(
    family: Family, kind: str, num_encoders: int
) -> None:
    images: list[Media] = [Picture(noise(90, 150, 3, seed=1)), Picture(noise(60, 60, 3, seed=2))]
    media = images if kind == "images" else [clip_of(family)]
    inputs: Any = family.their_inputs(media, SAMPLING)
    with torch.inference_mode(), trained_positions_in(family.model):
        sequence = family.model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=[]
        )
    expected = sequence[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer(family, media, num_encoders) == expected
