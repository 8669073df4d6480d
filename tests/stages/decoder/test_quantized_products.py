"""The Triton kernels of quantised matrices against their plain torch twins; every byte of FP8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epd.stages.kernels.quantized_plain import Fp8Matrix, Int4Matrix, multiply_plain
from tests.stages.decoder.quantized_matrices import fp8_matrix, int4_matrix, moved
from tests.stages.decoder.test_fusions import drawn, on_gpu

# Against the twin in float32: kernels add up products in float32 too, and round the sums once.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
BLOCKS = [(128, 128), None]
# Rows [T], matrix [N, C], its blocks of FP8 or its group of 4 bits: decodes and chunks, not of whole tiles.
CASES: list[tuple[int, int, int, tuple[int, int] | int | None]] = [
    (3, 200, 256, (128, 128)), (20, 72, 160, (128, 128)), (3, 200, 160, None), (20, 33, 128, None),
    (3, 200, 256, 128), (20, 72, 128, 128), (1, 33, 64, 32), (20, 40, 64, 32),
]  # fmt: skip


def compare_all(device: str) -> int:
    """Fused against plain, which is computed in float32 on a CPU."""
    torch.manual_seed(0)
    for number, (num_rows, num_out, num_in, kind) in enumerate(CASES):
        matrix: Fp8Matrix | Int4Matrix
        if isinstance(kind, int):
            matrix = int4_matrix(num_out, num_in, kind)
        else:
            matrix = fp8_matrix(num_out, num_in, kind)
        for dtype in TOLERANCE:
            compare(matrix, num_rows, dtype, device, has_bias=number % 2 == 0)
    return len(CASES)


def compare(
    matrix: Fp8Matrix | Int4Matrix, num_rows: int, dtype: torch.dtype, device: str, *, has_bias: bool
) -> None:
    from epd.stages.kernels.quantized_products import fp8_product, int4_product

    rows = drawn(num_rows, 2 * matrix.num_columns, dtype=dtype)[:, : matrix.num_columns]
    bias = drawn(matrix.num_rows, dtype=dtype) if has_bias else None
    there, bias_there = rows.to(device), None if bias is None else bias.to(device)
    product = fp8_product if isinstance(matrix, Fp8Matrix) else int4_product
    found = product(there, moved(matrix, device), bias_there)
    expected = multiply_plain(rows.float(), matrix, None if bias is None else bias.float())
    assert close(found, expected), (type(matrix).__name__, num_rows, dtype)


def close(found: Tensor, expected: Tensor) -> bool:
    difference = (found.cpu().float() - expected).abs().max()
    return bool(difference <= TOLERANCE[found.dtype] * expected.abs().max())


def compare_every_byte(device: str) -> bool:
    """Each value of FP8 but the two that are no number, times one: a kernel reads it as torch does."""
    from epd.stages.kernels.quantized_products import fp8_product

    every = torch.arange(256, dtype=torch.uint8)
    every[[127, 255]] = 0
    values = torch.zeros(256, 32, dtype=torch.uint8)
    values[:, 0] = every
    matrix = Fp8Matrix(values.to(device).view(torch.float8_e4m3fn), torch.ones(256, 1).to(device), 1, 32)
    rows = torch.eye(1, 32, dtype=torch.float16).to(device)
    expected = every.view(torch.float8_e4m3fn).to(torch.float16)
    return torch.equal(fp8_product(rows, matrix, None)[0].cpu(), expected)


@on_gpu
def test_the_compiled_kernels_equal_their_twins() -> None:
    assert compare_all("cuda") == len(CASES)
    assert compare_every_byte("cuda")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_of_fp8_are_scaled_each_by_its_own(block: tuple[int, int] | None) -> None:
    """By hand: every value one, so that a product of ones is the sum of a row's scales."""
    matrix = fp8_matrix(200, 300, block)
    ones = replace(matrix, values=torch.ones(200, 300).to(torch.float8_e4m3fn))
    found = multiply_plain(torch.ones(1, 300), ones, None)[0]
    widths = torch.tensor([128.0, 128.0, 44.0] if block else [300.0])
    sums = (matrix.scales.float() * widths).sum(1)
    torch.testing.assert_close(found, sums[torch.arange(200) // matrix.rows_of_scale])


def test_values_of_four_bits_are_those_of_their_halves_of_a_group() -> None:
    """By hand: one row, two groups of four columns."""
    packed = torch.tensor([[0x31, 0x42, 0xDC, 0xFE]], dtype=torch.uint8)
    zeros, scales = torch.tensor([[1, 12]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]])
    matrix = Int4Matrix(packed, zeros, scales)
    assert matrix.dequantised(0, 1).tolist() == [[0.0, 0.5, 1.0, 1.5, 0.0, 4.0, 2.0, 6.0]]
