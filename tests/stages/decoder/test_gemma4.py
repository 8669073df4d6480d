"""Gemma 4's layers: logits are those of transformers, whole and in chunks, and layers keep what they must."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma4TextConfig

from epd.encoders import load_adapter
from epd.engine_config import EngineConfig
from epd.errors import UnsupportedModelError
from epd.stages.attention.support import lenders
from epd.stages.decoder.text_model import text_model
from epd.stages.engine.generation import GenerationSettings
from epd.stages.engine.model_runner import ModelRunner, kv_layouts
from epd.stages.engine.packed_pass import Segment
from epd.stages.engine.setup import build_engine, kv_shape
from epd.stages.loading.weights import skeleton
from tests.encoders.tiny_gemma import GEMMA4_EXPERTS, GEMMA4_SMALL, build_gemma4
from tests.models.test_published import written
from tests.tiny_models import load_reference

NUM_TOKENS, CHUNK, BLOCKS = 90, 32, np.arange(8, dtype=np.int32)
KINDS: dict[str, dict[str, Any]] = {"large": {}, "small": GEMMA4_SMALL, "experts": GEMMA4_EXPERTS}


@pytest.fixture(params=KINDS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma4(tmp_path_factory.mktemp("gemma4") / request.param, **KINDS[request.param])


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """With layers whose rows are scaled, as those of published weights are."""
    model = load_reference(folder)
    for number, layer in enumerate(model.get_decoder().layers):
        layer.layer_scalar.fill_(0.9 + 0.02 * number)
    return model


def runner_of(folder: Path, model: Any) -> ModelRunner:
    engine = build_engine(
        model,
        load_adapter(folder),
        GenerationSettings(eos_ids=frozenset()),
        options=EngineConfig(num_kv_tokens=1024),
    )
    return engine._runner


def test_logits_equal_those_of_transformers(folder: Path, model: Any) -> None:
    """They are bounded softly, and bounded further than any is. Placeholders without media are padding."""
    ids = torch.randint(0, 250, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    config = model.config
    ids[0, 40:43] = torch.tensor([config.image_token_id, config.video_token_id, config.audio_token_id])
    config = model.get_decoder().config
    config.final_logit_softcapping = 0.02
    with torch.inference_mode():
        theirs = copy.deepcopy(model)(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids)).logits[0]
    runner = runner_of(folder, model)
    assert 0.01 < theirs.abs().max() < 0.02
    torch.testing.assert_close(logits(runner, ids, NUM_TOKENS), theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(runner, ids, CHUNK), theirs, atol=1e-5, rtol=0)


def logits(runner: ModelRunner, ids: Tensor, chunk: int) -> Tensor:
    """Of all tokens, in passes of so many."""
    passes = [(start, min(start + chunk, NUM_TOKENS)) for start in range(0, NUM_TOKENS, chunk)]
    segments = [
        Segment(
            token_ids=ids[0, start:stop].numpy(),
            positions=np.arange(start, stop)[None],
            num_cached=[start] * 2,
            block_tables=[BLOCKS] * 2,
            num_logits=stop - start,
        )
        for start, stop in passes
    ]
    return torch.cat([runner.run([segment]) for segment in segments])


# A small shape by transformers' defaults, whose last 20 layers keep nothing; a large one, of keys that are
# values too. Layers, heads and their channels, with and without a window.
SHAPES: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, int, int]]] = {
    "small": ({"num_kv_shared_layers": 18}, (2, 4, 512), (10, 4, 256)),
    "large": (
        {
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
        (10, 4, 512),
        (50, 16, 256),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_takes_what_its_kind_of_layer_has(name: str, tmp_path: Path) -> None:
    text, whole, local = SHAPES[name]
    config = written({"model_type": "gemma4", "text_config": text, "audio_config": None}, tmp_path)
    model: Any = skeleton(config, torch.bfloat16)
    assert text_model(model.get_decoder()) is not None
    found = [(each.num_layers, each.num_kv_heads, each.head_dim) for each, _ in kv_layouts(model)]
    assert found == [whole, local]
    shape = kv_shape(model, num_kv_tokens=100_000, max_num_seqs=1)
    full = sum(100_000 * layout.bytes_per_token for layout, _ in kv_layouts(model))
    assert sum(shape.bytes_by_group) / full < 0.35


def test_later_layers_attend_the_keys_of_the_last_layer_of_their_kind() -> None:
    config = Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=4)
    assert lenders(config) == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 5]


def test_transformers_own_modules_are_refused_in_one_line(folder: Path, model: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="'gemma4_text' with layers, positions or"):
        build_engine(
            model,
            load_adapter(folder),
            GenerationSettings(eos_ids=frozenset()),
            options=EngineConfig(num_kv_tokens=1024),
            by_modules=True,
        )
