"""Random quantised matrices, in the forms that are multiplied."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from epd.stages.kernels.quantized_plain import Fp8Matrices, Fp8Matrix, Int4Matrix
from epd.stages.loading.quantized_forms import TensorForm
from epd.stages.loading.quantized_linear import QuantizedLinear


def fp8_matrix(num_out: int, num_in: int, block: tuple[int, int] | None) -> Fp8Matrix:
    """block: whose values share a scale; those of a row if None."""
    values = torch.randn(num_out, num_in).clamp(-3, 3).to(torch.float8_e4m3fn)
    rows, columns = block or (1, num_in)
    scales = torch.rand(-(-num_out // rows), -(-num_in // columns)) + 0.5
    return Fp8Matrix(values, scales.bfloat16(), rows, columns)


def fp8_matrices(num: int, num_out: int, num_in: int, block: tuple[int, int] | None) -> Fp8Matrices:
    """The same of several matrices."""
    each = [fp8_matrix(num_out, num_in, block) for _ in range(num)]
    values, scales = (torch.stack([getattr(one, name) for one in each]) for name in ("values", "scales"))
    return Fp8Matrices(values, scales, each[0].rows_of_scale, each[0].columns_of_scale)


def to_fp8(model: Any) -> Any:
    """Replaces the linear modules of a language model's layers by those in FP8, without values."""
    layers = model.get_decoder().layers
    for name, linear in list(layers.named_modules()):
        if isinstance(linear, nn.Linear):
            rows, columns = linear.weight.shape
            parts = {
                "weight": TensorForm("", (rows, columns), torch.float8_e4m3fn, (1, columns), "fp8"),
                "scales": TensorForm("", (rows, 1), torch.float32, (1, columns), "fp8_scales"),
            }
            module = QuantizedLinear(linear, parts, is_weight_only=False)
            for part, form in parts.items():
                empty = torch.empty(form.shape, dtype=form.dtype, device=linear.weight.device)
                module.register_parameter(part, nn.Parameter(empty, requires_grad=False))
            layers.set_submodule(name, module)
    return model


def int4_matrix(num_out: int, num_in: int, group: int) -> Int4Matrix:
    packed = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (num_out, num_in // group), dtype=torch.uint8)
    return Int4Matrix(packed, zeros, (torch.rand(num_out, num_in // group) + 0.5).half())


def in_float64(rows: Tensor, matrix: Fp8Matrix, bias: Tensor | None, group: int) -> Tensor:
    """Rows rounded to FP8, each group of columns by its largest value, times what the matrix stands for."""
    groups = rows.double().unflatten(1, (-1, group))
    steps = (groups.abs().amax(2, keepdim=True) / 448).clamp_min(1e-30)
    near = (groups / steps).float().to(torch.float8_e4m3fn).double() * steps
    product = near.flatten(1) @ matrix.dequantised(0, matrix.num_rows).double().t()
    return product if bias is None else product + bias.double()


def moved(matrix: Any, device: Any) -> Any:
    """The same matrix on a device."""
    values = {each.name: getattr(matrix, each.name) for each in fields(matrix)}
    return replace(
        matrix, **{name: each.to(device) for name, each in values.items() if torch.is_tensor(each)}
    )
