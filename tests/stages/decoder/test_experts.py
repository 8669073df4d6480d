"""Mixtures of experts: against transformers' own, and the Triton kernels against their plain twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4TextConfig, Qwen3MoeConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock

from epd.stages.decoder.experts import Experts, SparseMlp, experts_plain
from epd.stages.decoder.operations import gelu_mul, silu_mul
from tests.stages.decoder.quantized_matrices import fp8_matrices, moved
from tests.stages.decoder.test_fusions import drawn, on_gpu

# Against the twin in float32: kernels add up products in float32 too, and round three times.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Rows, how their experts are drawn, experts of each, experts, channels, and channels within an expert.
CASES = [
    (1, "evenly", 2, 8, 64, 24),
    (5, "evenly", 3, 8, 160, 40),
    (21, "all on one", 1, 3, 48, 16),
    (70, "most on two", 2, 4, 80, 36),  # tiles of chunks, of which one expert has several
    (9, "evenly", 4, 4, 32, 16),
]
# The same of experts in FP8, and the block whose values share a scale; None for rows.
FP8_CASES = [
    (1, "evenly", 2, 8, 200, 128, (128, 128)),
    (70, "most on two", 2, 4, 256, 256, (128, 128)),
    (21, "evenly", 3, 8, 96, 24, None),
    (70, "most on two", 2, 4, 80, 36, None),
]


def routed(num_rows: int, how: str, top_k: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Chosen experts and their weights, [T, K] each; of those of "most on two" nobody chose the last."""
    scores = torch.rand(num_rows, num_experts)
    if how == "all on one":
        scores[:, 1] += 1
    if how == "most on two":
        scores[3:, :2] += 1
        scores[:, -1] -= 1
    weights, chosen = scores.topk(top_k)
    return chosen, weights


def matrices(num_experts: int, size: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shapes = ((num_experts, 2 * width, size), (num_experts, size, width))
    gate_up, down = (drawn(*shape, dtype=dtype).div_(shape[-1] ** 0.5) for shape in shapes)
    return gate_up, down


def compare_all(device: str) -> int:
    """Fused against plain, which is computed in float32 on a CPU."""
    torch.manual_seed(0)
    for number, case in enumerate(CASES + FP8_CASES):
        for dtype in TOLERANCE:
            compare(case, dtype, device, is_gelu=number % 2 == 1)
    return len(CASES + FP8_CASES)


def compare(case: tuple[Any, ...], dtype: torch.dtype, device: str, *, is_gelu: bool) -> None:
    """Of an expert that nobody chose the matrices, or their scales, are no numbers."""
    from epd.stages.kernels.grouped_products import experts_fused

    num_rows, how, top_k, num_experts, size, width, *block = case
    chosen, weights = routed(num_rows, how, top_k, num_experts)
    rows, activate = drawn(num_rows, 2 * size, dtype=dtype)[:, :size], gelu_mul if is_gelu else silu_mul
    gate_up: Any
    down: Any
    if block:
        gate_up = fp8_matrices(num_experts, 2 * width, size, block[0])
        down = fp8_matrices(num_experts, size, width, block[0])
        plain = Experts(gate_up.dequantised(torch.float32), down.dequantised(torch.float32), activate)
        twin = experts_plain(rows.float(), Experts(gate_up, down, activate), chosen, weights)
    else:
        gate_up, down = matrices(num_experts, size, width, dtype)
        plain = Experts(gate_up.float(), down.float(), activate)
    expected = experts_plain(rows.float(), plain, chosen, weights)
    if block:
        torch.testing.assert_close(twin, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    for each in set(range(num_experts)) - set(chosen.flatten().tolist()):
        for matrix in (gate_up, down):
            (matrix.scales if block else matrix)[each] = torch.nan
    there = [moved(each, device) if block else each.to(device) for each in (gate_up, down)]
    routing = [each.to(device) for each in (chosen, weights)]
    found = experts_fused(rows.to(device), (there[0], there[1]), *routing, is_gelu=is_gelu)
    difference = (found.cpu().float() - expected).abs().max()
    assert difference <= TOLERANCE[dtype] * expected.abs().max(), (case, dtype)


def compare_arranged(device: str) -> int:
    """Every pair is in a tile of its expert once, in order, whichever way places of tiles are counted."""
    from epd.stages.kernels.grouped_products import _arranged
    from epd.stages.kernels.quantized_products import Tile

    torch.manual_seed(0)
    for num_rows, how, top_k, num_experts in ((3, "evenly", 2, 8), (70, "most on two", 3, 4)):
        chosen, _ = routed(num_rows, how, top_k, num_experts)
        order, tiles = (
            each.tolist() for each in _arranged(chosen.to(device), num_experts, Tile(16, 1, 1, 4, 1))
        )
        taken = [(expert, order[first:stop]) for expert, first, stop in tiles if first < stop]
        assert all(len(pairs) <= 16 for _, pairs in taken)
        assert [pair for _, pairs in taken for pair in pairs] == chosen.flatten().argsort(
            stable=True
        ).tolist()
        assert all(chosen.flatten()[pair] == expert for expert, pairs in taken for pair in pairs)
    return len(tiles) - len(taken)


def compare_turned(device: str) -> str:
    """What is said of matrices whose columns are in one piece, as some files have them."""
    from epd.stages.kernels.grouped_products import experts_fused

    gate_up, down = (each.to(device) for each in matrices(2, 32, 16, torch.float32))
    routing = [each.to(device) for each in routed(1, "evenly", 1, 2)]
    rows, turned = gate_up[0, :1], down.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="give it in one piece"):
        experts_fused(rows, (gate_up, turned), *routing, is_gelu=False)
    return "refused"


@on_gpu
def test_the_compiled_kernels_equal_their_twin() -> None:
    assert compare_all("cuda") == len(CASES + FP8_CASES)
    assert compare_arranged("cuda") > 0


def drawn_weights(module: Any) -> Any:
    """The experts of transformers with weights, computed one after another."""
    module.config._experts_implementation = "eager"
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("num_rows", [0, 1, 40])
def test_experts_are_those_of_transformers(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 24, "num_experts": 4}
    for theirs, activate in (
        (Qwen3MoeExperts(Qwen3MoeConfig(**sizes)), silu_mul),
        (Gemma4TextExperts(Gemma4TextConfig(**sizes)), gelu_mul),
    ):
        rows, routing = torch.randn(num_rows, 64), routed(num_rows, "most on two", 2, 4)
        expected = drawn_weights(theirs)(rows, *routing)
        torch.testing.assert_close(
            Experts.of(theirs, activate)(rows, *routing), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("is_normalised", [True, False])
def test_weights_are_normalised_where_the_router_does_it(is_normalised: bool) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    theirs = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, norm_topk_prob=is_normalised))
    drawn_weights(theirs.experts)
    torch.nn.init.normal_(theirs.gate.weight)
    ours = SparseMlp(theirs.gate, Experts.of(theirs.experts), None, None, None)
    with torch.inference_mode():
        rows = torch.randn(7, 64)
        torch.testing.assert_close(ours(rows), theirs(rows[None])[0], rtol=1e-5, atol=1e-5)
