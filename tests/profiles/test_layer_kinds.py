"""Recurrent layers, sliding windows and experts in computed profiles, against figures counted by hand.

Modules: `epd/profiles/analytic.py`, `epd/profiles/cost.py`, `epd/profiles/shapes.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MiniCPMV4_6Config
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6VisionModel

from epd.encoders.names import is_wanted
from epd.errors import RequestError
from epd.profiles.analytic import Efficiency, analytic_profile
from epd.profiles.catalogue import MODELS, model_named
from epd.profiles.configurations import shape_of
from epd.profiles.cost import StageCost
from epd.profiles.memory import MemoryLimits
from epd.profiles.profile import Profile
from epd.stages.loading.weights import skeleton
from epd.workload.requests import Resolution, VideoSpec
from tests.models.published import Published
from tests.models.recurrent import MINICPM, RECURRENT, STATE_BYTES
from tests.models.test_windowed import LAYERS, TEXTS
from tests.models.windowed import WINDOW_BYTES, WINDOWED

_GIGA = 10**9
# 70 % of the bandwidth of an H100.
_BYTES_PER_S = 0.7 * 3.35e12
_SPARSE = "qwen3.5-35b-a3b"
# Of it: 40 layers of 256 experts of three matrices; eight compute a token.
_EXPERT_BYTES = 2 * 40 * 256 * 3 * 2048 * 512
_WEIGHT_BYTES = 69.32 * _GIGA


def profile_of(model: str) -> Profile:
    return analytic_profile("h100", model, Efficiency(compute=0.5, launch_s=0.0, replay_s=0.0))


@pytest.mark.parametrize(("name", "published"), {**RECURRENT, **MINICPM}.items())
def test_a_recurrent_model_is_that_of_the_catalogue(name: str, published: Published) -> None:
    shape = MODELS[name.lower()]
    assert shape_of(name.lower(), published.config) == shape
    memory = profile_of(name).memory
    assert memory.kv_bytes_per_token == published.kv_bytes_per_token
    assert memory.state_bytes == STATE_BYTES[name]
    assert shape.context_tokens == published.context_tokens


@pytest.mark.parametrize(
    ("name", "giga"),
    [
        *(("Qwen3.5-0.8B", 1.50), ("Qwen3.5-9B", 17.91), ("Qwen3.5-27B", 53.79), ("Qwen3.5-35B-A3B", 69.32)),
        *(("Gemma-4-E2B", 9.26), ("Gemma-4-E4B", 14.93), ("Gemma-4-26B-A4B", 50.47), ("Gemma-4-31B", 61.39)),
    ],
)
def test_weights_are_those_of_the_page_of_models(name: str, giga: float) -> None:
    assert profile_of(name).memory.language_weight_bytes / _GIGA == pytest.approx(giga, abs=0.006)


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_that_read_keys_of_others_keep_none(name: str) -> None:
    """Gemma 4, whose layers with a window have heads of another size, and of which the last keep nothing."""
    published, shape = WINDOWED[name], MODELS[name.lower()]
    assert shape_of(name.lower(), published.config) == shape
    assert shape.context_tokens == published.context_tokens
    memory = profile_of(name).memory
    assert memory.kv_bytes_per_token == published.kv_bytes_per_token
    assert memory.window_bytes_per_token * memory.window_tokens == WINDOW_BYTES[name]


def test_a_step_reads_no_table_of_which_a_token_takes_a_row() -> None:
    """Of Gemma 4 E2B: 35 layers get 256 channels of each of 262,144 tokens, half of all weights."""
    profile = profile_of("gemma-4-e2b")
    table_bytes = 2 * 262_144 * 35 * 256
    read_bytes = profile.memory.language_weight_bytes - table_bytes + WINDOW_BYTES["Gemma-4-E2B"]
    assert profile.decode.cost.seconds(1) == pytest.approx(read_bytes / _BYTES_PER_S, rel=1e-3)
    assert table_bytes > 0.5 * profile.memory.language_weight_bytes


@pytest.mark.parametrize("size", TEXTS)
def test_windows_are_apart_from_what_keeps_all_tokens(size: str) -> None:
    windowed, full, layer_bytes = LAYERS[size]
    memory = profile_of(f"gemma-3-{size}").memory
    assert memory.kv_bytes_per_token == full * layer_bytes
    assert (memory.window_bytes_per_token, memory.window_tokens) == (windowed * layer_bytes, 1024)
    assert memory.sequence_bytes(100) == 100 * (full + windowed) * layer_bytes
    assert memory.sequence_bytes(10_000) == (10_000 * full + 1024 * windowed) * layer_bytes


@pytest.mark.parametrize("size", TEXTS)
def test_the_file_of_a_gemma_is_the_model_of_the_catalogue(size: str, tmp_path: Path) -> None:
    """Its file leaves out what is transformers' default, and the kinds of its layers."""
    text = {"sliding_window": 1024} | TEXTS[size]
    tower = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16}
    tower |= {"num_hidden_layers": 27, "patch_size": 14}
    folder = tmp_path / f"gemma-3-{size}"
    folder.mkdir()
    content = {"model_type": "gemma3", "text_config": text, "vision_config": tower}
    (folder / "config.json").write_text(json.dumps(content))
    assert model_named(str(folder)) == MODELS[f"gemma-3-{size}"]
    assert MODELS[f"gemma-3-{size}"].media.image(Resolution(4000, 3000)).num_tokens == 256
    with pytest.raises(RequestError, match="allowed: images and text"):
        MODELS[f"gemma-3-{size}"].media.video(VideoSpec(10.0, 30, Resolution(640, 480)))


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """One token 8 of 256, 64 tokens 87 % if each draws evenly; beside them its state, read and written."""
    cost = profile_of(_SPARSE).decode.cost
    beside = _WEIGHT_BYTES - _EXPERT_BYTES
    for num_sequences, share in ((1, 8 / 256), (64, 0.8689)):
        states = num_sequences * 2 * STATE_BYTES["Qwen3.5-35B-A3B"]
        read = beside + share * _EXPERT_BYTES + states
        assert cost.seconds(num_sequences) == pytest.approx(read / _BYTES_PER_S, rel=1e-3)
    assert cost.seconds(1) < 0.11 * _WEIGHT_BYTES / _BYTES_PER_S


def test_text_and_media_have_experts_of_their_own() -> None:
    """ERNIE 4.5 VL: 27 of 28 layers have 64 experts for text and 64 for media, two of text's for all tokens.

    A step of decoding reads the experts of text, a pass of prefill both, and computes media: six of theirs.
    """
    profile = profile_of("ernie-4.5-vl-28b-a3b")
    of_text, of_media = (2 * 27 * 64 * 3 * 2560 * width for width in (1536, 512))
    assert profile.decode.cost.experts_s == pytest.approx(of_text / _BYTES_PER_S)
    assert profile.prefill.cost.experts_s == pytest.approx((of_text + of_media) / _BYTES_PER_S)
    attention, head = 28 * 2560 * 128 * (2 * 20 + 2 * 4), 103_424 * 2560
    mlps = 3 * 2560 * (12_288 + 27 * (2 * 1536 + 6 * 512))
    flops = 2 * (attention + head + mlps + 27 * 64 * 2560)  # the last are routers
    assert profile.prefill.cost.per_unit_s == pytest.approx(flops / (0.5 * 989e12))


def test_a_step_reads_full_windows_and_all_tokens_of_other_layers() -> None:
    windowed, full, layer_bytes = LAYERS["27b"]
    cost = profile_of("gemma-3-27b").decode.cost
    assert cost.per_item_s == pytest.approx(full * layer_bytes / _BYTES_PER_S)
    assert cost.read_s == pytest.approx(1024 * windowed * layer_bytes / _BYTES_PER_S)


def test_only_layers_that_attend_all_tokens_cost_more_in_a_longer_prompt() -> None:
    """Ten layers of 16 heads of 256 channels: four FLOPs a pair and channel, half of 989 TFLOP/s."""
    cost = profile_of(_SPARSE).prefill.cost
    assert cost.per_item_s == pytest.approx(4 * 10 * 16 * 256 / (0.5 * 989e12))


def test_a_prompt_of_100_000_tokens_takes_a_quarter_of_full_attention() -> None:
    shape = MODELS["qwen3.5-9b"].language
    held = profile_of("qwen3.5-9b").memory.sequence_bytes(100_000)
    everywhere = replace(shape, delta=None).kv_values_per_token * 2 * 100_000
    assert 0.25 < held / everywhere < 0.26


def test_slots_of_states_and_windows_are_left_out_of_the_room_for_tokens() -> None:
    """Two slots an answer and eight more, as the engine has them."""
    memory = profile_of("qwen3.5-9b").memory
    room = memory.worker(frozenset({"decode"}), MemoryLimits(num_seqs=64))
    assert room.sequence_bytes == (2 * 64 + 8) * STATE_BYTES["Qwen3.5-9B"]
    assert room.peak_bytes == pytest.approx(0.9 * memory.device_bytes, abs=memory.kv_bytes_per_token)
    assert "states and windows 7.01 GB" in str(room)
    assert memory.worker(frozenset({"encode"}), MemoryLimits(num_seqs=64)).sequence_bytes == 0
    windowed = profile_of("gemma-3-27b").memory
    few = windowed.worker(frozenset({"decode"}), MemoryLimits(num_seqs=256, utilization=0.75))
    assert few.kv_tokens * windowed.window_bytes_per_token == pytest.approx(few.sequence_bytes, rel=1e-3), (
        "less room than all windows: each layer has as many tokens as the others"
    )


def test_scaled_costs_keep_what_units_read() -> None:
    cost = StageCost(floor_s=1.0, read_s=0.5, experts_s=4.0, active_share=0.25)
    assert cost.seconds(2) == 1 + 4 * (1 - 0.75**2) + 2 * 0.5
    assert cost.times(3).seconds(2) == 3 * cost.seconds(2)
    with pytest.raises(ValueError, match="a share up to 1"):
        StageCost(active_share=1.5)


def test_weights_of_a_minicpm_are_those_of_its_modules() -> None:
    config, shape = MINICPM["MiniCPM-V-4.6"].config, MODELS["minicpm-v-4.6"]
    model = skeleton(MiniCPMV4_6Config(**config), torch.bfloat16)
    tower = sum(each.numel() for name, each in model.named_parameters() if is_wanted(name, "encode"))
    language = sum(each.numel() for each in model.get_decoder().parameters())
    assert shape.vision.num_parameters + shape.num_projector_parameters == pytest.approx(tower, rel=0.005)
    assert shape.language.num_parameters == pytest.approx(language, rel=0.005)


def test_a_tower_that_joins_patches_computes_a_quarter_of_them_from_there() -> None:
    """Of 1,024 patches, against what its modules compute: two layers alone have all of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 240, "num_hidden_layers": 8, "num_attention_heads": 4}
    published = MINICPM["MiniCPM-V-4.6"].config
    config = published | {"insert_layer_id": 1, "vision_config": published["vision_config"] | sizes}
    tower = MiniCPMV4_6VisionModel(MiniCPMV4_6Config(**config).vision_config).eval()
    tower.config._attn_implementation = "sdpa"
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        tower(torch.zeros(1, 3, 14, 14 * 1024), target_sizes=torch.tensor([[32, 32]]))
    shape = shape_of("minicpm-v-4.6", config)
    of_patches = 2 * 1024 * 3 * 14**2 * 64
    assert 1024 * shape.vision.flops_per_token + of_patches == pytest.approx(
        counted.get_total_flops(), rel=0.01
    )
