"""Qwen3.5 in full size and without memory: our decoder knows it, and its memory is what its layers keep."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.encoders.names import is_wanted, name_in_model
from epd.encoders.registry import ADAPTERS
from epd.engine_config import RECURRENT_FAMILIES
from epd.kv.kv_cache import KVCacheManager
from epd.kv.kv_room import KVCacheSpec
from epd.kv.prefix_cache import token_identity
from epd.profiles.analytic import analytic_profile
from epd.profiles.memory import MemoryLimits
from epd.stages.attention.support import RECURRENT as TEXT_MODELS
from epd.stages.attention.support import check_attention
from epd.stages.decoder.rank_cut import cut_model
from epd.stages.decoder.text_model import text_model
from epd.stages.engine.model_runner import kv_layouts
from epd.stages.engine.setup import kv_shape
from epd.stages.engine.state_pool import state_layout
from epd.stages.loading.weights import prune, skeleton
from epd.stages.rank import Rank
from tests.models.recurrent import RECURRENT, STATE_BYTES
from tests.models.test_published import written

BF16 = torch.bfloat16
IN_FILES = (
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.0.linear_attn.A_log",
    "model.language_model.layers.0.linear_attn.conv1d.weight",
    "model.language_model.layers.0.linear_attn.dt_bias",
    "model.language_model.layers.2.linear_attn.in_proj_qkv.weight",
    "model.language_model.layers.2.linear_attn.norm.weight",
    "model.language_model.layers.3.self_attn.q_norm.weight",
    "model.language_model.layers.3.self_attn.q_proj.weight",
    "model.language_model.norm.weight",
    "model.visual.merger.linear_fc2.bias",
    "model.visual.pos_embed.weight",
)


@pytest.fixture(params=RECURRENT, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    named: str = request.param
    return named


@pytest.fixture(scope="module")
def config(name: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("recurrent")
    return written(RECURRENT[name].config, folder)


@pytest.fixture(scope="module")
def model(config: Any) -> Any:
    return skeleton(config, BF16)


def test_our_decoder_computes_it(config: Any, model: Any) -> None:
    known = text_model(model.get_decoder())
    assert known is not None
    assert (known.has_gates, len(known.inv_freq), known.head_dim) == (True, 32, 256)
    check_attention(config)
    assert config.model_type in ADAPTERS
    assert config.model_type in RECURRENT_FAMILIES
    assert config.get_text_config().model_type in TEXT_MODELS


def test_names_in_the_files_are_those_of_the_model(model: Any) -> None:
    known = model.state_dict().keys()
    assert {name_in_model(each, known) for each in IN_FILES} == set(IN_FILES)
    assert name_in_model("mtp.layers.0.self_attn.q_proj.weight", known) is None, (
        "heads for drafts are left out"
    )
    language = {each for each in known if not is_wanted(each, "encode")}
    assert {each for each in known if ".visual." in each} == known - language


def test_a_token_and_a_sequence_take_the_counted_bytes(name: str, config: Any, model: Any) -> None:
    layout, state = kv_layouts(model)[0][0], state_layout(model)
    assert layout.bytes_per_token == RECURRENT[name].kv_bytes_per_token
    assert state is not None
    assert state.bytes_per_sequence == STATE_BYTES[name]
    num_layers = config.get_text_config().num_hidden_layers
    assert (layout.num_layers, state.num_layers) == (num_layers // 4, num_layers * 3 // 4)
    part = skeleton(config, BF16)
    prune(part, "language")
    assert (kv_layouts(part)[0][0], state_layout(part)) == (layout, state)


def test_a_rank_of_two_has_half(config: Any, model: Any) -> None:
    part = skeleton(copy.deepcopy(config), BF16)
    cut_model(part, Rank(1, 2))
    (layout, _), state = kv_layouts(part)[0], state_layout(part)
    assert state is not None
    assert state.of_ranks(2) == state_layout(model)
    assert 2 * layout.bytes_per_token == kv_layouts(model)[0][0].bytes_per_token
    held, whole = (sum(each.numel() for each in one.get_decoder().parameters()) for one in (part, model))
    assert 0.5 < held / whole < 0.51, "norms and routers are everywhere"


def test_the_planner_sizes_the_pools_of_the_engine(name: str, model: Any) -> None:
    shape = kv_shape(model, num_kv_tokens=100_000, max_num_seqs=4)
    limits = MemoryLimits(num_seqs=4, kv_tokens=100_000)
    found = analytic_profile("h100", name).memory.worker(frozenset({"decode"}), limits)
    assert ([found.kv_bytes], found.sequence_bytes) == (list(shape.bytes_by_group), shape.state_bytes)


def test_a_long_prompt_takes_a_quarter_of_what_full_attention_takes(model: Any) -> None:
    """100,000 tokens in one sequence: keys and values of every fourth layer, and two slots for its state."""
    shape = kv_shape(model, num_kv_tokens=100_000, max_num_seqs=1)
    layers = len(model.get_decoder().layers)
    full = 100_000 * shape.groups[0].layout.bytes_per_token * layers // shape.groups[0].layout.num_layers
    assert shape.states is not None
    needed = sum(shape.bytes_by_group) + 2 * shape.states.layout.bytes_per_sequence
    assert 0.25 <= needed / full < 0.29


# Of a token and layer, and of a state and layer, a 64th of what Qwen3.5-9B has.
_NARROW = {
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 256,
}


def test_a_long_prompt_holds_a_quarter_of_the_memory_of_full_attention(tmp_path: Path) -> None:
    """Measured: the blocks and slots that 100,000 tokens hold, as bytes of real pools."""
    published = RECURRENT["Qwen3.5-9B"].config
    text = published["text_config"] | _NARROW
    held = list[int]()
    for kinds in (text["layer_types"], ["full_attention"] * 32):
        folder = tmp_path / str(len(held))
        folder.mkdir()
        config = written(published | {"text_config": text | {"layer_types": kinds}}, folder)
        held.append(held_bytes(skeleton(config, BF16), 100_000))
    assert held[1] == 100_000 * 32 * 2 * 16 * 2
    assert 0.25 < held[0] / held[1] < 0.26


def held_bytes(model: Any, num_tokens: int) -> int:
    """Returns what a prompt holds of a worker's pools while its last chunk is computed."""
    shape = kv_shape(model, num_kv_tokens=num_tokens + 4096, max_num_seqs=4)
    pools, num_states = shape.build(), 0 if shape.states is None else shape.states.num_states
    kv = KVCacheManager(KVCacheSpec(tuple(each.num_blocks for each in shape.groups), 16, num_states))
    identity = token_identity(range(num_tokens))
    kv.open("r", identity, max_cached=0)
    for start in range(0, num_tokens, 10_000):
        kv.commit("r", identity, start)
        kv.allocate("r", start + 10_000)
    parts = [
        plane[block]
        for group, pool in enumerate(pools.groups)
        for block in kv.block_table("r", group)
        for plane in pool.planes
    ]
    for slot in (kv.current_state("r"), kv.next_state("r")):
        if pools.states is not None and slot is not None:
            parts += [pools.states.matrices[slot], pools.states.tails[slot]]
    return sum(part.nbytes for part in parts)
