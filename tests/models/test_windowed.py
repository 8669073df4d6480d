"""Gemma 3 in full size and without memory: our decoder knows it, and windows bound what a prompt takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from epd.encoders.names import is_wanted, name_in_model
from epd.encoders.registry import ADAPTERS
from epd.engine_config import WINDOWED_FAMILIES
from epd.profiles.analytic import analytic_profile
from epd.profiles.memory import MemoryLimits
from epd.stages.attention.support import WINDOWED, check_attention
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.decoder.text_model import text_model
from epd.stages.engine.model_runner import kv_bytes_per_token, kv_layouts
from epd.stages.engine.setup import kv_shape
from epd.stages.loading.weights import skeleton
from epd.stages.rank import Rank
from tests.models.published import Config
from tests.models.test_published import written

BF16 = torch.bfloat16
_TEXT = {
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
_TOWER = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
# As config.json of google/gemma-3-4b-it and gemma-3-27b-it have it: what is missing is transformers' default.
TEXTS: dict[str, Config] = {
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}
# Layers with and without a window, and bytes of a token of one layer: 2 x heads of keys x their size x 2.
LAYERS = {"4b": (29, 5, 4096), "27b": (52, 10, 8192)}
IN_FILES = {
    "language_model.model.embed_tokens.weight": "model.language_model.embed_tokens.weight",
    "language_model.model.layers.5.self_attn.q_norm.weight": (
        "model.language_model.layers.5.self_attn.q_norm.weight"
    ),
    "language_model.model.layers.0.pre_feedforward_layernorm.weight": (
        "model.language_model.layers.0.pre_feedforward_layernorm.weight"
    ),
    "multi_modal_projector.mm_input_projection_weight": (
        "model.multi_modal_projector.mm_input_projection_weight"
    ),
}


@pytest.fixture(params=TEXTS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    named: str = request.param
    return named


@pytest.fixture(scope="module")
def config(name: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    text = {"model_type": "gemma3", "text_config": _TEXT | TEXTS[name], "vision_config": _TOWER}
    return written(text, tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def model(config: Any) -> Any:
    return skeleton(config, BF16)


def test_our_decoder_computes_it(config: Any, model: Any) -> None:
    known = text_model(model.get_decoder())
    assert known is not None
    assert known.local is not None
    assert known.inv_freq[1] < known.local.inv_freq[1], "the base of layers with windows is lower"
    check_attention(config)
    assert config.model_type in ADAPTERS
    assert config.model_type in WINDOWED_FAMILIES
    assert config.get_text_config().model_type in WINDOWED


def test_names_in_the_files_are_those_of_the_model(model: Any) -> None:
    known = model.state_dict().keys()
    assert {each: name_in_model(each, known) for each in IN_FILES} == IN_FILES
    tower = {each for each in known if is_wanted(each, "encode")}
    assert {each for each in known if "vision_tower" in each or "projector" in each} == tower


def test_a_token_takes_the_counted_bytes_in_each_group(name: str, model: Any) -> None:
    windowed, full, each = LAYERS[name]
    assert kv_bytes_per_token(model) == (windowed + full) * each
    layouts = [(layout.bytes_per_token, window) for layout, window in kv_layouts(model)]
    assert layouts == [(full * each, None), (windowed * each, 1024)]


def test_a_rank_of_two_has_half(model: Any, config: Any) -> None:
    part = skeleton(copy.deepcopy(config), BF16)
    cut_model(part, Rank(1, 2))
    assert 2 * kv_bytes_per_token(part) == kv_bytes_per_token(model)
    held, whole = (sum(each.numel() for each in one.get_decoder().parameters()) for one in (part, model))
    assert 0.5 < held / whole < 0.51, "norms are everywhere"


def test_the_planner_sizes_the_pools_of_the_engine(name: str, model: Any) -> None:
    """Of four answers, and of so many that windows have as much room as other layers."""
    needs = analytic_profile("h100", f"gemma-3-{name}").memory
    for seqs in (4, 4000):
        shape = kv_shape(model, num_kv_tokens=100_000, max_num_seqs=seqs, max_chunk_tokens=2048)
        limits = MemoryLimits(num_seqs=seqs, kv_tokens=100_000, chunk_tokens=2048)
        found = needs.worker(frozenset({"decode"}), limits)
        assert [found.kv_bytes, found.sequence_bytes] == list(shape.bytes_by_group)


def test_a_long_prompt_takes_a_quarter_of_what_full_attention_takes(name: str, model: Any) -> None:
    """100,000 tokens of one sequence, with room for kept prompts: all of them in every sixth layer."""
    shape = kv_shape(model, num_kv_tokens=100_000, max_num_seqs=1)
    full = 100_000 * kv_bytes_per_token(model)
    assert [group.window for group in shape.groups] == [None, 1024]
    assert 0.15 < sum(shape.bytes_by_group) / full < 0.28
