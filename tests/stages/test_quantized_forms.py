"""Stored tensors of quantised matrices become what is multiplied; those that do not fit are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from epd.encoders.quantization import Quantization
from epd.stages.decoder.layers import GATE_UP, _merged
from epd.stages.decoder.linear import JoinedLinear
from epd.stages.kernels.quantized_plain import Fp8Matrix, Int4Matrix
from epd.stages.loading.quantized_experts import quantize_experts
from epd.stages.loading.quantized_forms import TensorForm, awq_values, forms_of, pack
from epd.stages.loading.quantized_linear import QuantizedLinear, QuantizedProduct, quantize_modules
from tests.models.quantized import awq_parts, quantized_parts

AWQ = Quantization("awq", 4, (1, 128))
BLOCKS = Quantization("fp8", 8, (128, 128))
F8 = torch.float8_e4m3fn


def test_awq_words_are_taken_apart_in_their_order() -> None:
    """The word 0x76543210 has the value 0 in its lowest four bits, and so on."""
    assert awq_values(torch.tensor([[0x76543210]], dtype=torch.int32)).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    negative = torch.tensor([[-1, 0x8]], dtype=torch.int32)
    assert awq_values(negative).tolist() == [[15] * 8 + [8] + [0] * 7]


def test_two_values_of_a_group_share_a_byte() -> None:
    values = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert [[hex(byte) for byte in row] for row in pack(values, 4).tolist()] == [
        ["0x20", "0x31", "0x64", "0x75"],
        ["0xa8", "0xb9", "0xec", "0xfd"],
    ]


def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {f"a.{name}": (each.shape, each.dtype) for name, each in tensors.items()}


def fp8(
    shape: tuple[int, ...], scales: tuple[int, ...] = (1,), name: str = "weight_scale_inv"
) -> dict[str, Tensor]:
    return {"weight": torch.zeros(shape).to(F8), name: torch.ones(scales)}


def test_scales_of_fp8_are_those_of_blocks_rows_or_all() -> None:
    for scales, kept, block in [((1,), (200, 1), (1, 300)), ((), (200, 1), (1, 300)),
                                ((200,), (200, 1), (1, 300)), ((200, 1), (200, 1), (1, 300)),
                                ((2, 3), (2, 3), (128, 128))]:  # fmt: skip
        form = forms_of(described(fp8((200, 300), scales)), BLOCKS)["a.weight_scale_inv"]
        assert (form.name, form.shape, form.block) == ("a.scales", kept, block)
        assert form.of(torch.ones(scales)).shape == kept


WRONG = {
    r"a.weight is of FP8 and has 0 tensors of scales": ({"weight": torch.zeros(4, 4).to(F8)}, BLOCKS),
    r"a.weight is of FP8 and has 2 tensors of scales": (
        fp8((4, 4)) | {"weight_scale": torch.ones(1)}, BLOCKS,
    ),
    r"a.weight_scale_inv has shape \(2, 2\), its matrix wants \(2, 3\)": (fp8((200, 300), (2, 2)), BLOCKS),
    r"a.weight_scale has shape \(2, 3\), its matrix wants \(200, 1\)": (
        fp8((200, 300), (2, 3), "weight_scale"), Quantization("compressed-tensors", 8, None),
    ),
    r"a.down_proj is of FP8 and has shape \(2, 200, 256\); allowed: experts of whole blocks": (
        {"down_proj": torch.zeros(2, 200, 256).to(F8), "down_proj_scale_inv": torch.ones(2, 2, 2)}, BLOCKS,
    ),
    r"a.down_proj_scale_inv has shape \(2, 1, 2\), its matrix wants \(2, 2, 1\)": (
        {"down_proj": torch.zeros(2, 256, 128).to(F8), "down_proj_scale_inv": torch.ones(2, 1, 2)}, BLOCKS,
    ),
    r"the tensor a.gate_up_proj_scale_inv is missing": (
        {"gate_up_proj": torch.zeros(2, 256, 256).to(F8)}, BLOCKS,
    ),
    r"the tensor a.qzeros is missing": ({"qweight": torch.zeros(128, 2, dtype=torch.int32)}, AWQ),
    r"a.qzeros has shape \(2, 2\), its matrix wants \(1, 2\)": (
        {"qweight": torch.zeros(128, 2, dtype=torch.int32), "qzeros": torch.zeros(2, 2),
         "scales": torch.zeros(1, 16)}, AWQ,
    ),
    r"a.scales has shape \(1, 8\), its matrix wants \(1, 16\)": (
        {"qweight": torch.zeros(128, 2, dtype=torch.int32), "qzeros": torch.zeros(1, 2),
         "scales": torch.zeros(1, 8)}, AWQ,
    ),
    r"a.qweight has 100 columns, which groups of 128 do not divide": (
        {"qweight": torch.zeros(100, 2, dtype=torch.int32), "qzeros": torch.zeros(1, 2),
         "scales": torch.zeros(1, 16)}, AWQ,
    ),
    r"a.qweight is torch.int64 \(128, 2\), which is not the layout": (
        {"qweight": torch.zeros(128, 2, dtype=torch.int64), "qzeros": torch.zeros(1, 2),
         "scales": torch.zeros(1, 16)}, AWQ,
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_tensors_that_do_not_belong_together_are_refused(message: str) -> None:
    tensors, quantization = WRONG[message]
    with pytest.raises(ValueError, match=message):
        forms_of(described(tensors), quantization)


class Mlp(nn.Module):
    """Two matrices of the same rows, of which some are quantised as files have them."""

    def __init__(self, **kinds: str | None) -> None:
        super().__init__()
        self.stands_for = []
        torch.manual_seed(0)
        for name, rows in zip(GATE_UP, (256, 200), strict=True):
            self.register_module(name, nn.Linear(256, rows))
            self._quantize(name, kinds[name])

    def _quantize(self, name: str, kind: str | None) -> None:
        weight = self.get_submodule(name).weight.detach()
        rows, columns = (torch.arange(size) // 128 + 1 for size in weight.shape)
        weight.mul_(rows[:, None] * columns)  # so that blocks differ
        if kind is None:
            self.stands_for.append(weight)
            return
        if kind == "fp8" and weight.shape[0] % 128:  # a part of a block
            weight = functional.pad(weight, (0, 0, 0, 56))
            tensors, values = quantized_parts(kind, weight)
            tensors["weight"], values = tensors["weight"][:200], values[:200]
        else:
            tensors, values = awq_parts(weight, 128) if kind == "awq" else quantized_parts(kind, weight)
        self.stands_for.append(values)
        named = {f"{name}.{part}": each for part, each in tensors.items()}
        stored = {each: (tensor.shape, tensor.dtype) for each, tensor in named.items()}
        forms = forms_of(stored, AWQ if kind == "awq" else BLOCKS)
        quantize_modules(self, forms.values())
        for each, tensor in named.items():
            module = self.get_submodule(name)
            part = forms[each].name.rpartition(".")[2]
            setattr(module, part, nn.Parameter(forms[each].of(tensor), requires_grad=False))


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize(
    ("gate", "up", "is_merged"),
    [
        ("fp8", "fp8", True), ("fp8-dynamic", "fp8-dynamic", True), ("fp8-tensor", "fp8-dynamic", True),
        ("awq", "awq", True), ("fp8", "fp8-dynamic", False), ("awq", "fp8", False), ("awq", None, False),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_matrices_that_are_quantised_alike_are_multiplied_as_one(
    gate: str | None, up: str | None, is_merged: bool, num_rows: int
) -> None:
    mlp = Mlp(gate_proj=gate, up_proj=up)
    rows = torch.randn(num_rows, 256)
    product = _merged(mlp, GATE_UP, "plain")
    assert isinstance(product, QuantizedProduct if is_merged else JoinedLinear)
    biases = [mlp.get_submodule(name).bias for name in GATE_UP]
    expected = functional.linear(rows, torch.cat(mlp.stands_for), torch.cat(biases))  # type: ignore[arg-type]
    torch.testing.assert_close(product(rows), expected, rtol=1e-5, atol=1e-5)
    alone = torch.cat([mlp.get_submodule(name)(rows) for name in GATE_UP], 1)
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)


def test_a_matrix_whose_last_block_is_cut_is_not_merged_before_another() -> None:
    """Rows of the second would have scales of the first."""
    mlp = Mlp(gate_proj="fp8", up_proj="fp8")
    assert isinstance(_merged(mlp, GATE_UP[::-1], "plain"), JoinedLinear)


def test_pieces_of_a_matrix_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.stages.kernels.quantized_plain._PIECE", 2**14)
    for kind in ("fp8", "fp8-dynamic", "awq"):
        mlp = Mlp(gate_proj=kind, up_proj=None)
        rows, module = torch.randn(3, 256), mlp.get_submodule("gate_proj")
        with torch.inference_mode():
            expected = functional.linear(rows, mlp.stands_for[0], module.bias)  # type: ignore[arg-type]
            torch.testing.assert_close(module(rows), expected, rtol=1e-5, atol=1e-5)


def test_only_linear_modules_that_fit_are_replaced() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(4, 8), nn.Embedding(8, 4)

    def named(name: str, shape: tuple[int, int]) -> dict[str, Any]:
        return {f"{name}.weight": (shape, F8), f"{name}.weight_scale": ((1,), torch.float32)}

    model = Model()
    quantize_modules(model, forms_of(named("a", (8, 4)) | named("other", (2, 2)), BLOCKS).values())
    assert isinstance(model.a, QuantizedLinear)
    assert isinstance(model.b, nn.Linear)
    with pytest.raises(ValueError, match=r"b has shape \(4, 4\), the model wants \(8, 4\)"):
        quantize_modules(model, forms_of(named("b", (4, 4)), BLOCKS).values())
    with pytest.raises(ValueError, match="c is a quantised Embedding; allowed: linear modules"):
        quantize_modules(model, forms_of(named("c", (8, 4)), BLOCKS).values())


class Experts(nn.Module):
    """Two experts of 192 channels, without memory."""

    def __init__(self, *, has_bias: bool = False) -> None:
        super().__init__()
        shapes = {"gate_up_proj": (2, 384, 256), "down_proj": (2, 256, 192)}
        for name, shape in (shapes | ({"down_bias": (2, 256)} if has_bias else {})).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))


def test_experts_that_are_not_alike_or_have_more_than_matrices_are_refused() -> None:
    """Blocks that gate and up would share; scales of two types; a bias."""
    blocks, rows = (TensorForm("", (1, 1), torch.float32, block) for block in ((128, 128), (1, 256)))
    halves = replace(rows, dtype=torch.float16)
    for has_bias, forms, message in (
        (False, [blocks], "experts have 192 channels, which blocks of 128 rows do not divide"),
        (False, [rows, halves], "mlp.experts has 2 kinds of scales; allowed: 1"),
        (True, [rows], "mlp.experts are experts with down_bias; allowed: matrices in FP8"),
    ):
        model = nn.Module()
        model.mlp = nn.Module()
        model.mlp.experts = Experts(has_bias=has_bias)
        with pytest.raises(ValueError, match=message):
            quantize_experts(model, "mlp.experts", forms)


def test_matrices_say_their_sizes() -> None:
    values = Fp8Matrix(torch.zeros(3, 5).to(F8), torch.ones(3, 1), 1, 5)
    packed = Int4Matrix(torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 4), torch.ones(3, 4))
    assert (values.num_rows, values.num_columns) == (3, 5)
    assert (packed.num_rows, packed.num_columns, packed.group) == (3, 128, 32)
