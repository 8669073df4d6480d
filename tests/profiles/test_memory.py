"""Memory of workers by role: what each part is, what is left for keys and values, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from epd.errors import InfeasibleError
from epd.profiles.analytic import AS_FAST_IN_FP8, analytic_profile
from epd.profiles.memory import MemoryLimits, MemoryNeeds
from epd.simulate import Deployment, Simulation
from epd.stages.engine.kv_pool import KVLayout
from epd.stages.memory_sizing import DEFAULT_EMBEDDINGS
from epd.topology import Stage, parse_topology
from tests.models.published import PUBLISHED
from tests.models.quantized import LAYOUTS

GB = 10**9
FP8, W4A16 = (LAYOUTS[name].config for name in ("fp8", "w4a16"))
NEEDS = MemoryNeeds(
    device_bytes=100 * GB,
    vision_weight_bytes=2 * GB,
    language_weight_bytes=30 * GB,
    kv_bytes_per_token=10**5,
    embedding_bytes_per_token=10**4,
    encode_bytes_per_patch=10**6,
    prefill_bytes_per_token=2 * 10**5,
    logits_bytes_per_sequence=10**6,
    fixed_bytes=GB,
)
LIMITS = MemoryLimits(encode_patches=4000, pass_tokens=5000, num_seqs=100, num_embeddings=10**5)


def roles_of(letters: str) -> frozenset[Stage]:
    stages: dict[str, Stage] = {"e": "encode", "p": "prefill", "d": "decode"}
    return frozenset(stages[letter] for letter in letters)


@pytest.mark.parametrize(
    ("letters", "weights", "activations", "embeddings"),
    [
        ("e", 2, 4, 1),
        ("p", 30, 1.1, 1),
        ("d", 30, 0.12, 0),
        ("pd", 30, 1.1, 1),
        ("ep", 32, 4, 2),  # the larger of two turns
        ("ed", 32, 4, 1),
        ("epd", 32, 4, 2),
    ],
)
def test_a_role_holds_what_it_needs_and_no_more(
    letters: str, weights: float, activations: float, embeddings: float
) -> None:
    found = NEEDS.worker(roles_of(letters), LIMITS)
    assert found.letters == letters
    assert found.weight_bytes == weights * GB
    assert found.activation_bytes == activations * GB
    assert found.embedding_bytes == embeddings * GB
    fixed = (1 + weights + activations + embeddings) * GB
    if letters == "e":
        assert (found.kv_bytes, found.kv_tokens, found.peak_bytes) == (0, 0, fixed)
    else:
        assert found.kv_tokens == (90 * GB - fixed) // 10**5
        assert found.peak_bytes == pytest.approx(90 * GB, abs=10**5)
        assert found.peak_bytes <= found.allowed_bytes


def test_a_worker_that_encodes_beside_its_passes_holds_the_activations_of_both() -> None:
    beside = replace(LIMITS, encode_beside=True)
    parts = [NEEDS.worker(roles_of(letters), LIMITS).activation_bytes for letters in ("e", "pd")]
    assert NEEDS.worker(roles_of("epd"), LIMITS).activation_bytes == max(parts)
    assert NEEDS.worker(roles_of("epd"), beside).activation_bytes == sum(parts)
    assert [NEEDS.worker(roles_of(each), beside).activation_bytes for each in ("e", "pd")] == parts
    deployment = Deployment(parse_topology("1epd"), encode_beside=False)
    profile = analytic_profile("a100-80gb", "qwen2.5-vl-7b")
    in_turns, both = (
        replace(deployment, encode_beside=each).memory(profile, roles_of("epd")) for each in (False, True)
    )
    assert in_turns.activation_bytes < both.activation_bytes


def test_caps_and_wishes_for_keys_and_values() -> None:
    capped = replace(NEEDS, max_kv_tokens=1000).worker(roles_of("d"), LIMITS)
    assert (capped.kv_tokens, capped.kv_bytes) == (1000, 10**8)
    wished = NEEDS.worker(roles_of("d"), replace(LIMITS, kv_tokens=77))
    assert wished.kv_tokens == 77


@pytest.mark.parametrize(
    ("letters", "device_gb", "limits", "words"),
    [
        ("e", 8, LIMITS, r"roles e for m, .* 8 GB \(weights 2 GB, activations 4 GB, .* smaller batches"),
        ("epd", 40, LIMITS, r"allowed are 36 GB, 90% of dev; take a larger device, split the encoder off"),
        ("p", 30, LIMITS, "a smaller model"),
        ("d", 100, replace(LIMITS, kv_tokens=10**6), "keys and values 100 GB"),
    ],
)
def test_what_does_not_fit_is_refused(letters: str, device_gb: int, limits: MemoryLimits, words: str) -> None:
    needs = replace(NEEDS, device_bytes=device_gb * GB)
    with pytest.raises(InfeasibleError, match=words):
        needs.worker(roles_of(letters), limits).check("m", "dev", 16)
    NEEDS.worker(roles_of(letters), LIMITS).check("m", "dev", 16)


def test_values_in_8_bits_take_what_their_pool_takes() -> None:
    """Heads of 128 channels: 256 + 128 + 4 bytes in place of 512."""
    whole, less = (
        analytic_profile("h100", "qwen2.5-vl-7b", kv_cache_dtype=name) for name in ("auto", "int8_values")
    )
    needs = whole.memory, less.memory
    layouts = (KVLayout(28, 4, 128, torch.bfloat16, int8_values=is_less) for is_less in (False, True))
    assert [each.kv_bytes_per_token for each in needs] == [each.bytes_per_token for each in layouts]
    kv_tokens = [each.worker(roles_of("d"), LIMITS).kv_tokens for each in needs]
    assert kv_tokens[1] / kv_tokens[0] == pytest.approx(512 / 388, rel=1e-3)
    reads = [each.decode.cost.per_item_s for each in (whole, less)]
    assert reads[1] / reads[0] == pytest.approx(388 / 512)
    assert (whole.kv_cache_dtype, less.kv_cache_dtype) == ("auto", "int8_values")


def test_layers_in_fp8_take_half_and_are_read_in_half_the_time() -> None:
    """Qwen2.5-VL-7B: attention and MLP of 28 layers; embeddings and head have 16 bits."""
    in_layers = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18_944)
    whole, less = (analytic_profile("h100", "qwen2.5-vl-7b", quantization=name) for name in (None, "fp8"))
    saved = whole.memory.language_weight_bytes - less.memory.language_weight_bytes
    assert saved == in_layers
    share = less.memory.language_weight_bytes / whole.memory.language_weight_bytes
    assert 0.5 < share < 0.6
    assert less.decode.cost.floor_s / whole.decode.cost.floor_s == pytest.approx(share)
    assert less.memory.vision_weight_bytes == whole.memory.vision_weight_bytes
    assert (whole.quantization, less.quantization) == (None, "fp8")


def test_fp8_checkpoints_take_what_their_layers_have(tmp_path: Path) -> None:
    """By the name of a published one, and by `quantization_config`: 29.9 of 30.5 billion are in layers."""
    name = "Qwen/Qwen3-VL-30B-A3B-Instruct-FP8"
    whole, less = (analytic_profile("h100", each) for each in (name.removesuffix("-FP8"), name))
    assert less.memory.language_weight_bytes == pytest.approx(31.1e9, rel=0.005)
    assert whole.memory.language_weight_bytes == pytest.approx(61.1e9, rel=0.005)
    assert less.decode.cost.experts_s / whole.decode.cost.experts_s == pytest.approx(0.5)
    assert less.decode.cost.floor_s > 0.5 * whole.decode.cost.floor_s, "the head has 16 bits"
    assert less.quantization is None, "a server needs no option for it"
    assert AS_FAST_IN_FP8 in less.assumptions
    assert AS_FAST_IN_FP8 not in whole.assumptions
    config = PUBLISHED["Qwen3-VL-30B-A3B"].config
    for settings, least in ((FP8, 31.1e9), (W4A16, 16.8e9), (None, 61.1e9)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        found = analytic_profile("h100", str(tmp_path)).memory.language_weight_bytes
        assert found == pytest.approx(least, rel=0.01)


def test_windows_of_values_in_8_bits_are_smaller_too() -> None:
    whole, less = (
        analytic_profile("h100", "gemma-3-4b", kv_cache_dtype=name) for name in ("auto", "int8_values")
    )
    share = (3 * 256 + 4) / (4 * 256)  # heads of 256
    assert less.memory.window_bytes_per_token / whole.memory.window_bytes_per_token == pytest.approx(share)
    assert less.decode.cost.read_s / whole.decode.cost.read_s == pytest.approx(share)


def test_an_encoder_needs_no_room_for_the_language_model() -> None:
    """26 billion parameters do not fit 30 GB; their tower alone does."""
    profile = analytic_profile("a100-80gb", "internvl2-26b")
    small = replace(profile, memory=replace(profile.memory, device_bytes=30 * GB))
    deployment = Deployment(parse_topology("1e1p1d"))
    assert deployment.memory(small, roles_of("e")).weight_bytes == pytest.approx(11.1 * GB, rel=0.02)
    with pytest.raises(InfeasibleError, match="roles p for internvl2-26b"):
        Simulation(small, deployment)


def test_a_group_larger_than_the_batch_is_a_batch() -> None:
    profile = analytic_profile("a100-80gb", "qwen2.5-vl-7b")
    deployment = Deployment(parse_topology("1e1pd"), max_batch_patches=1000, largest_group_patches=9000)
    found = deployment.memory(profile, roles_of("e")).activation_bytes
    assert found == pytest.approx(9000 * profile.memory.encode_bytes_per_patch)


def test_a_group_of_tiles_is_encoded_in_batches() -> None:
    """13 tiles of 1,024 patches; a batch that is smaller than a tile takes one."""
    profile = analytic_profile("a100-80gb", "internvl2-8b")
    per_patch = profile.memory.encode_bytes_per_patch
    for limit, held in ((4096, 4096), (500, 1024)):
        deployment = Deployment(
            parse_topology("1e1pd"), max_batch_patches=limit, largest_group_patches=13_312
        )
        found = deployment.memory(profile, roles_of("e")).activation_bytes
        assert found == pytest.approx(held * per_patch)


def test_the_simulated_pools_are_those_of_the_application() -> None:
    """A plan sets num_kv_tokens, and so embeddings are not sized by memory."""
    assert Deployment(parse_topology("1epd")).num_embeddings == DEFAULT_EMBEDDINGS
