"""Replaces linear modules whose weights are quantised by those that have a place for what the files hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from epd.encoders.kernels.dispatch import uses_kernels
from epd.encoders.names import name_in_model
from epd.stages import kernels
from epd.stages.kernels.quantized_plain import Fp8Matrix, Int4Matrix, multiply_plain
from epd.stages.loading.merged_weights import merged
from epd.stages.loading.quantized_forms import TensorForm

# Rows of AWQ that share a word of a file.
_AWQ_ROWS = 8
_FP8_PARTS, _INT4_PARTS = ("weight", "scales"), ("packed", "zeros", "scales")


@dataclass(frozen=True, slots=True)
class QuantizedProduct:
    """Multiplies rows by a quantised matrix: by a kernel on a GPU, else in plain torch. bias: [N]."""

    matrix: Fp8Matrix | Int4Matrix
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [T, N] of rows [T, C]."""
        if not uses_kernels(rows):
            return multiply_plain(rows, self.matrix, self.bias)
        product: Tensor
        if isinstance(self.matrix, Fp8Matrix):
            product = kernels.fp8_product(rows, self.matrix, self.bias)
        else:
            product = kernels.int4_product(rows, self.matrix, self.bias)
        return product


class QuantizedLinear(nn.Module):
    """Computes what a linear module does, from a quantised weight.

    Its parameters are `weight` and `scales`, or `packed`, `zeros` and `scales`, as in `quantized_forms`.
    in_features, out_features: of all ranks, as in a linear module that is cut.
    """

    scales: nn.Parameter

    def __init__(self, linear: nn.Linear, parts: Mapping[str, TensorForm]) -> None:
        """Replaces a linear module. parts: forms of its tensors by the names of parameters."""
        super().__init__()
        for name, form in parts.items():
            empty = torch.empty(form.shape, dtype=form.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", linear.bias)
        self.block = parts["scales"].block
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the names of the parameters that make up the matrix."""
        return _FP8_PARTS if hasattr(self, "weight") else _INT4_PARTS

    @property
    def units(self) -> tuple[int, int]:
        """Returns how many rows, and how many columns, of the matrix can only be cut out together."""
        if not hasattr(self, "weight"):
            return _AWQ_ROWS, self.block[1]
        return self.block[0], self.block[1] if self.scales.shape[1] > 1 else 1

    def unit_of(self, part: str) -> tuple[int, int]:
        """Returns how many rows and columns of the matrix one of a parameter stands for."""
        if part == "scales" or part == "zeros":
            return self.block
        return (1, 2) if part == "packed" else (1, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Returns [..., N] of rows [..., C]."""
        product = product_of([self])(rows.flatten(0, -2))
        return product.view(*rows.shape[:-1], product.shape[-1])


def can_merge(modules: Sequence[nn.Module]) -> bool:
    """Reports whether linear modules are quantised alike, so that their matrices can be one."""
    parts = [module for module in modules if isinstance(module, QuantizedLinear)]
    if len(parts) < len(modules):
        return False
    kinds = {(each.parts, each.block, each.scales.dtype, each.scales.shape[1]) for each in parts}
    num_rows = [len(getattr(each, each.parts[0])) for each in parts[:-1]]
    return len(kinds) == 1 and not any(each % parts[0].block[0] for each in num_rows)


def product_of(modules: Sequence[QuantizedLinear]) -> QuantizedProduct:
    """Returns the product with the matrices of modules that `can_merge`, one above the other."""
    matrix: Fp8Matrix | Int4Matrix
    parts = {part: _merged(modules, part) for part in modules[0].parts}
    if "weight" in parts:
        matrix = Fp8Matrix(parts["weight"], parts["scales"], *modules[0].block)
    else:
        matrix = Int4Matrix(parts["packed"], parts["zeros"], parts["scales"])
    return QuantizedProduct(matrix, merged(modules, "bias"))


def _merged(modules: Sequence[QuantizedLinear], part: str) -> Tensor:
    whole = merged(modules, part)
    assert whole is not None
    return whole


def quantize_modules(model: nn.Module, forms: Iterable[TensorForm]) -> None:
    """Replaces the linear modules of a skeleton that these are the forms of, where it has them.

    Raises ValueError for a quantised weight of any other module, and for one that does not fit.
    """
    known = model.state_dict(keep_vars=True)
    matrices: defaultdict[str, dict[str, TensorForm]] = defaultdict(dict)
    for form in forms:
        matrix, _, part = form.name.rpartition(".")
        matrices[matrix][part] = form
    for matrix, parts in matrices.items():
        name = name_in_model(f"{matrix}.weight", known)
        if name is not None:  # else it is of another role
            path = name.removesuffix(".weight")
            model.set_submodule(path, _replaced(matrix, model.get_submodule(path), parts))


def _replaced(matrix: str, module: nn.Module, parts: Mapping[str, TensorForm]) -> QuantizedLinear:
    if not isinstance(module, nn.Linear):
        kind = type(module).__name__
        raise ValueError(f"{matrix} is a quantised {kind}; allowed: linear modules; get another checkpoint")
    rows, columns = parts["weight"].shape if "weight" in parts else parts["packed"].shape
    stored = rows, columns if "weight" in parts else 2 * columns
    if stored != module.weight.shape:
        raise ValueError(f"{matrix} has shape {stored}, the model wants {tuple(module.weight.shape)}")
    return QuantizedLinear(module, parts)
