"""What lies between matrix products: by hand, and the Triton kernels against their plain torch twins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.glm4v.modeling_glm4v import apply_rotary_pos_emb as apply_rotary_of_glm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from epd.kv.kv_room import SCALE_BYTES
from epd.stages.decoder.operations import (
    RmsNorm,
    Rotations,
    add_rms_norm,
    norm_rotate_write,
    rotate,
    silu_mul,
)
from epd.stages.decoder.text_model import text_model
from epd.stages.kernels.scaled_values import scaled
from tests.stages.decoder.text_models import CONFIGS

HAS_GPU = torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*"))
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU in this machine")
# (query heads, KV heads, channels of a head, whether they are normed); width, gates
SHAPES = [((4, 2, 16), True, 64, 80), ((7, 1, 40), False, 48, 1030), ((2, 2, 24), True, 100, 17)]
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def rotations_of(angles: Tensor, dtype: torch.dtype) -> Rotations:
    """angles: [T, D / 2]."""
    cos, sin = angles.cos(), angles.sin()
    return Rotations(cos.to(dtype)[:, None, None], torch.stack((-sin, sin), 1).to(dtype)[:, None])


def compare_all(device: str) -> int:
    """Fused against plain, which is computed in float32 on a CPU."""
    num_compared = 0
    for heads, has_norms, width, gates in SHAPES:
        for dtype in TOLERANCE:
            compare_norm(width, dtype, device)
            compare_rotation(heads, has_norms, dtype, device)
            compare_scaled(heads, dtype, device)
            compare_gate(gates, dtype, device)
            compare_pairs(heads, dtype, device)
            num_compared += 5
    return num_compared


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours.cpu().float() - theirs).abs().max() <= TOLERANCE[ours.dtype] * theirs.abs().max())


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def compare_norm(width: int, dtype: torch.dtype, device: str) -> None:
    from epd.encoders.kernels.layer_fusions import add_rms_norm_fused

    rows, added, weight = (
        drawn(5, width, dtype=dtype),
        drawn(5, width, dtype=dtype),
        drawn(width, dtype=dtype),
    )
    norm = RmsNorm.of(weight.float(), 1e-5)
    for each in (added, None):
        ours, theirs = rows.to(device, copy=True), rows.float()
        normed = add_rms_norm_fused(ours, None if each is None else each.to(device), weight.to(device), 1e-5)
        assert close(normed, add_rms_norm(theirs, None if each is None else each.float(), norm))
        assert close(ours, theirs)


def compare_rotation(heads: tuple[int, int, int], has_norms: bool, dtype: torch.dtype, device: str) -> None:
    from epd.stages.kernels.kv_slots import norm_rotate_write_fused

    num_heads, num_kv_heads, dim = heads
    qkv = drawn(5, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    weights = (drawn(dim, dtype=dtype), drawn(dim, dtype=dtype))
    slots = torch.tensor([7, 0, 30, 31, 12])
    angles = torch.randn(5, dim // 2)
    ours, theirs = (torch.zeros(8, 2, 2, 4, num_kv_heads, dim) for _ in range(2))
    ours = ours.to(device, dtype)
    norms = (RmsNorm.of(weights[0].float(), 1e-5), RmsNorm.of(weights[1].float(), 1e-5))
    plain = norm_rotate_write(
        qkv.clone().float(), heads, norms if has_norms else (), rotations_of(angles, torch.float32),
        (theirs[:, 1, 0], theirs[:, 1, 1]), slots,
    )  # fmt: skip
    split = qkv.to(device, copy=True).view(5, -1, dim)
    turned = rotations_of(angles, dtype)
    norm_rotate_write_fused(
        split, (num_heads, num_kv_heads), tuple(each.to(device) for each in weights) if has_norms else None,
        1e-5, turned.cos.to(device), turned.sin.to(device), (ours[:, 1, 0], ours[:, 1, 1]), slots.to(device),
    )  # fmt: skip
    assert close(split, torch.cat(plain, dim=1))
    assert close(ours, theirs)
    assert not ours[:, 0].any(), "another layer"


def compare_scaled(heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Values that are written in 8 bits, bit by bit."""
    from epd.stages.kernels.kv_slots import norm_rotate_write_fused

    num_heads, num_kv_heads, dim = heads
    qkv = drawn(3, num_heads + 2 * num_kv_heads, dim, dtype=dtype).to(device)
    qkv[1, -1] = 0.0  # whose scale is 0
    keys = torch.zeros(8, 2, 4, num_kv_heads, dim, dtype=dtype, device=device)
    rows = torch.zeros(8, 2, 4, num_kv_heads, dim + SCALE_BYTES, dtype=torch.int8, device=device)
    slots, turned = torch.tensor([7, 0, 30], device=device), rotations_of(torch.randn(3, dim // 2), dtype)
    norm_rotate_write_fused(
        qkv, (num_heads, num_kv_heads), None, 1e-5, turned.cos.to(device), turned.sin.to(device),
        (keys[:, 1], rows[:, 1]), slots,
    )  # fmt: skip
    at = slots // 4, slots % 4
    assert torch.equal(keys[:, 1][at], qkv[:, num_heads : num_heads + num_kv_heads])
    assert torch.equal(rows[:, 1][at], scaled(qkv[:, num_heads + num_kv_heads :]))
    assert not rows[:, 0].any(), "another layer"


def compare_gate(size: int, dtype: torch.dtype, device: str) -> None:
    from epd.encoders.kernels.layer_fusions import silu_mul_fused

    gate_up = drawn(5, 2 * size, dtype=dtype)
    assert close(silu_mul_fused(gate_up.to(device)), silu_mul(gate_up.float()))


def compare_pairs(heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Queries and keys of a tower: the values beside them stay as they are."""
    from epd.encoders.families import qwen_tower
    from epd.encoders.kernels.layer_fusions import rotate_pairs_fused

    num_heads, _, dim = heads
    qkv, angles = drawn(5, 3, 2 * num_heads, dim, dtype=dtype), torch.randn(5, dim)
    ours, theirs = qkv.to(device, copy=True), qkv.float()
    rotate_pairs_fused(ours[:, :2], angles.cos().to(device), angles.sin().to(device))
    qwen_tower.rotate(theirs[:, :2], angles.cos(), angles.sin())
    assert close(ours, theirs)


def test_rotations_of_three_rows_are_in_one_piece() -> None:
    """The kernel reads them row by row, whichever way they were computed."""
    known = text_model(AutoModelForImageTextToText.from_config(CONFIGS["qwen2.5-vl"]()).get_decoder())
    assert known is not None
    rotations = Rotations.of(known, torch.arange(15).view(3, 5), torch.float32)
    assert rotations.cos.is_contiguous()
    assert rotations.sin.is_contiguous()


def test_a_kernel_refuses_rows_that_lie_apart() -> None:
    pytest.importorskip("triton")
    from epd.encoders.kernels.layer_fusions import silu_mul_fused
    from epd.stages.kernels.kv_slots import norm_rotate_write_fused

    heads, cos, caches = torch.zeros(3, 4, 8), torch.zeros(4, 3).t(), (torch.zeros(1, 4, 1, 8),) * 2
    with pytest.raises(ValueError, match="in one piece"):
        norm_rotate_write_fused(heads, (2, 1), None, 0.0, cos, torch.zeros(3, 2, 4), caches, torch.arange(3))
    with pytest.raises(ValueError, match="in one piece"):
        silu_mul_fused(torch.zeros(8, 4).t())


@on_gpu
def test_the_compiled_kernels_equal_their_twins() -> None:
    assert compare_all("cuda") == 12 * len(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = Qwen2RMSNorm(48, eps=1e-2).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    rows, added = torch.randn(7, 48, dtype=dtype) * 0.1, torch.randn(7, 48, dtype=dtype) * 0.1
    with torch.inference_mode():
        expected = theirs(rows + added)
        residual = rows.clone()
        normed = add_rms_norm(residual, added, RmsNorm.of(theirs.weight, 1e-2))
    assert torch.equal(residual, rows + added)
    torch.testing.assert_close(normed, expected, rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


def test_rotation_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    angles, heads = torch.randn(6, 8), torch.randn(6, 3, 16)
    whole = torch.cat((angles, angles), -1)[None]
    theirs, _ = apply_rotary_pos_emb(
        heads[None].transpose(1, 2), heads[None].transpose(1, 2), whole.cos(), whole.sin()
    )
    rotate(heads, rotations_of(angles, torch.float32))
    torch.testing.assert_close(heads, theirs[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_rotation_of_neighbours_in_part_is_that_of_glm() -> None:
    torch.manual_seed(0)
    angles, heads = torch.randn(6, 4), torch.randn(6, 3, 16)
    turned = angles.repeat_interleave(2, -1)[None]
    given = heads[None].transpose(1, 2)
    theirs, _ = apply_rotary_of_glm(given, given, turned.cos(), turned.sin())
    rotate(heads, replace(rotations_of(angles, torch.float32), by_neighbours=True))
    torch.testing.assert_close(heads, theirs[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_gates_by_hand() -> None:
    ours = silu_mul(torch.tensor([[0.0, 1.0, -2.0, 3.0, 5.0, 7.0]]))
    sigmoid = torch.tensor([0.0, 1.0, -2.0]).sigmoid()
    torch.testing.assert_close(ours, torch.tensor([[0.0, 5.0, -14.0]]) * sigmoid)
