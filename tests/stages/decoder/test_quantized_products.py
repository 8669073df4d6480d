"""The Triton kernels of quantised matrices against their plain torch twins; every byte of FP8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType

from epd.stages.kernels.quantized_plain import Fp8Matrix, Int4Matrix, fp8_rows_plain, multiply_plain
from epd.stages.loading import quantized_linear
from epd.stages.loading.quantized_forms import TensorForm
from epd.stages.loading.quantized_linear import Fp8Product, QuantizedLinear, can_multiply
from tests.stages.decoder.quantized_matrices import fp8_matrix, in_float64, int4_matrix, moved
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


# Rows [T, C], a part of wider ones, and the columns that share a scale.
ROWS = [(1, 256, 256), (5, 3000, 3000), (6, 384, 128), (3, 160, 160)]


def compare_rows(device: str) -> int:
    """To the last bit: rows of zeros, and rows of magnitudes that lie far apart."""
    from epd.stages.kernels.quantized_products import fp8_rows

    torch.manual_seed(0)
    for num_rows, num_in, group in ROWS:
        for dtype in TOLERANCE:
            rows = drawn(num_rows, 2 * num_in, dtype=dtype)[:, :num_in]
            rows *= torch.logspace(-3, 2, num_rows)[:, None].to(dtype)
            rows[num_rows // 2, : num_in // 2] = 0
            expected = fp8_rows_plain(rows, group)
            with _rounding_as_torch_does() if device == "cpu" else _nothing():
                found = fp8_rows(rows.to(device), group)
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine[:num_rows].cpu().float(), theirs[:num_rows].float()), dtype
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            assert found[1].stride(0) == 1, "as cuBLAS reads scales"
    return len(ROWS)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _rounding_as_torch_does() -> Iterator[None]:
    """Triton's interpreter loses the carry where a value of FP8 is rounded up to the next power of two."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) != "fp8e4nv":
            return convert(data, source, target, rounding)
        values = torch.from_numpy(data.copy()).to(torch.float8_e4m3fn)
        return values.view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", converted)
        yield


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
    if torch.cuda.get_device_capability() >= (8, 9):
        assert compare_rows("cuda") == len(ROWS)


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 8])
def test_a_product_in_fp8_is_that_of_rounded_rows(num_rows: int, dtype: torch.dtype) -> None:
    """As near as the type of the result allows."""
    torch.manual_seed(num_rows)
    matrix, rows = fp8_matrix(200, 160, None), drawn(num_rows, 160, dtype=dtype)
    rows[num_rows // 2 :] *= 100
    for bias in (None, drawn(200, dtype=dtype)):
        found = Fp8Product.of(matrix, "rows", bias)(rows)
        expected = in_float64(rows, matrix, bias, 160)
        assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, expected.shape, True)
        for mine, theirs in zip(found.double(), expected, strict=True):
            assert (mine - theirs).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()


def scaled_mm_of_blocks(
    left: Tensor, right: Tensor, left_scales: Tensor, by: Any, right_scales: Tensor, to: Any, **rest: Any
) -> Tensor:
    """What cuBLAS computes on Hopper, refusing what torch 2.15 refuses there (ScaledBlas.cpp)."""
    (num_rows, num_in), num_out = left.shape, right.shape[1]
    assert (by, to) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    assert left.stride() == (num_in, 1), "rows that follow each other"
    assert right.stride() == (1, num_in), "columns that do"
    assert num_rows % 4 == num_in % 16 == num_out % 16 == 0
    num_groups, padded = num_in // 128, -(-num_in // 512) * 4
    assert left_scales.shape == (num_rows, num_groups)
    assert left_scales.stride() == (1, num_rows)
    assert right_scales.shape == (padded, -(-num_out // 128))
    assert right_scales.stride() == (1, padded)
    assert left_scales.dtype == right_scales.dtype == torch.float32
    near = left.double() * left_scales.double().repeat_interleave(128, 1)
    blocks = right_scales[:num_groups].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    product = near @ (right.double() * blocks[:, :num_out])
    return (product if rest["bias"] is None else product + rest["bias"].double()).to(rest["output_dtype"])


def test_blocks_are_laid_out_as_torch_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm_of_blocks)
    for num_rows, num_in in ((1, 640), (5, 512), (8, 256)):
        matrix, rows = fp8_matrix(384, num_in, (128, 128)), drawn(num_rows, num_in, dtype=torch.bfloat16)
        for bias in (None, drawn(384, dtype=torch.bfloat16)):
            found = Fp8Product.of(matrix, "blocks", bias)(rows)
            expected = in_float64(rows, matrix, bias, 128)
            assert (found.double() - expected).abs().max() <= TOLERANCE[found.dtype] * expected.abs().max()


# (rows, columns, block, where rows are quantised): how it is multiplied on a CPU, and by compute capability.
_BY_DEVICE: dict[tuple[int, int, tuple[int, int], str], tuple[str, dict[tuple[int, int], str]]] = {
    (256, 512, (1, 512), "gpu"): (
        "weights",
        {(8, 0): "weights", (8, 6): "weights", (8, 9): "rows", (9, 0): "rows", (10, 0): "rows"},
    ),
    (256, 512, (1, 512), "everywhere"): ("rows", {(8, 0): "weights", (9, 0): "rows"}),
    (256, 512, (1, 512), "nowhere"): ("weights", {(9, 0): "weights"}),
    (256, 512, (128, 128), "gpu"): ("weights", {(8, 9): "weights", (9, 0): "blocks", (10, 0): "weights"}),
    (250, 512, (1, 512), "gpu"): ("weights", {(9, 0): "weights"}),
    (256, 520, (1, 520), "gpu"): ("weights", {(9, 0): "weights"}),
    (192, 512, (128, 128), "gpu"): ("weights", {(9, 0): "weights"}),
}


@pytest.mark.parametrize("described", _BY_DEVICE, ids=str)
def test_the_device_decides_how_a_matrix_is_multiplied(
    described: tuple[int, int, tuple[int, int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_out, num_in, block, rows_in = described
    on_cpu, by_capability = _BY_DEVICE[described]
    step = "fp8_scales" if rows_in == "everywhere" else "none"
    scales = TensorForm("m.scales", (-(-num_out // block[0]), num_in // block[1]), torch.float32, block, step)
    weight = TensorForm("m.weight", (num_out, num_in), torch.float8_e4m3fn, block)
    with torch.device("meta"):
        linear = nn.Linear(num_in, num_out)
    parts = {"weight": weight, "scales": scales}
    module = QuantizedLinear(linear, parts, is_weight_only=rows_in == "nowhere")
    assert module.fp8_kind == on_cpu
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda"))
    monkeypatch.setattr(quantized_linear, "can_multiply", lambda *_: True)
    for capability, kind in by_capability.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, known=capability: known)
        assert module.fp8_kind == kind, capability


def test_a_product_that_torch_lacks_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """As a CPU's, which has none by blocks."""
    cpu = torch.device("cpu")
    assert can_multiply("rows", cpu)
    assert not caplog.messages
    assert not can_multiply("blocks", cpu)
    assert "no FP8 products by blocks on cpu: " in caplog.text
