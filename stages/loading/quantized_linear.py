"""Replaces linear modules whose weights are quantised, and chooses how these are multiplied.

weights   values are dequantised inside of the product, by a kernel on a GPU, else in plain torch
rows      FP8 times FP8, with a scale for each row of both
blocks    FP8 times FP8, with a scale for each 128 columns of a row, and for blocks of the matrix
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType

from epd.encoders.kernels.dispatch import uses_kernels
from epd.encoders.names import EXPERT_MATRICES, EXPERT_SCALES, joint_part, name_in_model
from epd.encoders.quantization import FP8_BLOCK
from epd.stages import kernels
from epd.stages.kernels.quantized_plain import Fp8Matrix, Int4Matrix, fp8_rows_plain, multiply_plain
from epd.stages.loading.merged_weights import merged
from epd.stages.loading.quantized_experts import QuantizedExperts, quantize_experts
from epd.stages.loading.quantized_forms import TensorForm
from epd.stages.loading.weight_files import StoredTensor

logger = logging.getLogger(__name__)

# Rows of AWQ that share a word of a file.
_AWQ_ROWS = 8
_GATES = (".in_proj_a.weight", ".in_proj_b.weight")
_FP8_PARTS, _INT4_PARTS = ("weight", "scales"), ("packed", "zeros", "scales")
Fp8Kind = Literal["weights", "rows", "blocks"]
# Where rows are quantised, too: of matrices quantised here everywhere, so that a CPU answers as a GPU does.
RowsIn = Literal["nowhere", "gpu", "everywhere"]
# What torch multiplies: how rows and the matrix are scaled, of what both its sizes are multiples, and since
# which GPU, by compute capability. Blocks are Hopper's alone.
_RECIPES = {
    "rows": (ScalingType.RowWise, ScalingType.RowWise),
    "blocks": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
}
_MULTIPLES = {"rows": 16, "blocks": FP8_BLOCK[0]}
_FP8_ROWS, _FP8_BLOCKS = (8, 9), 9
_TOLD = {
    "weights": "dequantised in their products",
    "rows": "multiplied in FP8 by rows",
    "blocks": "multiplied in FP8 by blocks",
}


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


@dataclass(frozen=True, slots=True)
class Fp8Product:
    """Multiplies rows, which are quantised as they come, by an FP8 matrix, both in FP8.

    scales: of the matrix, float32, as torch wants them: [1, N], or [C / 128, N / 128] with columns of a
    multiple of four. bias: [N].
    """

    matrix: Fp8Matrix
    scales: Tensor
    kind: Fp8Kind
    bias: Tensor | None = None

    @classmethod
    def of(cls, matrix: Fp8Matrix, kind: Fp8Kind, bias: Tensor | None) -> Fp8Product:
        scales = matrix.scales.to(torch.float32)
        if kind == "blocks":
            scales = functional.pad(scales, (0, -scales.shape[1] % 4))
        return cls(matrix, scales.t(), kind, bias)

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [T, N] of rows [T, C]."""
        quantise = kernels.fp8_rows if uses_kernels(rows) else fp8_rows_plain
        is_by_row = self.kind == "rows"  # of a rank's columns, where it has some of them
        values, scales = quantise(rows, rows.shape[1] if is_by_row else self.matrix.columns_of_scale)
        left, right = _RECIPES[self.kind]
        is_16_bits = rows.dtype.itemsize == 2  # others' bias torch does not add on a GPU
        product: Tensor = functional.scaled_mm(
            values,
            self.matrix.values.t(),
            scales,
            left,
            self.scales,
            right,
            bias=self.bias if is_16_bits else None,
            output_dtype=rows.dtype,
        )[: len(rows)]
        return product if self.bias is None or is_16_bits else product.add_(self.bias)


class QuantizedLinear(nn.Module):
    """Computes what a linear module does, from a quantised weight.

    Its parameters are `weight` and `scales`, or `packed`, `zeros` and `scales`, as in `quantized_forms`.
    in_features, out_features: of all ranks, as in a linear module that is cut.
    """

    weight: nn.Parameter
    scales: nn.Parameter

    def __init__(self, linear: nn.Linear, parts: Mapping[str, TensorForm], *, is_weight_only: bool) -> None:
        """Replaces a linear module. parts: forms of its tensors by the names of parameters."""
        super().__init__()
        for name, form in parts.items():
            empty = torch.empty(form.shape, dtype=form.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", linear.bias)
        self.block = parts["scales"].block
        self._rows_in: RowsIn = "nowhere" if is_weight_only else "gpu"
        if parts["scales"].step == "fp8_scales":
            self._rows_in = "everywhere"
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

    @property
    def fp8_kind(self) -> Fp8Kind:
        """Returns how the matrix, and those that it is merged with, are multiplied."""
        return _fp8_kind(self.weight, self.block, self._rows_in) if hasattr(self, "weight") else "weights"

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


def _fp8_kind(values: Tensor, block: tuple[int, int], rows_in: RowsIn) -> Fp8Kind:
    """Decides how an FP8 matrix [N, C] is multiplied, by its device and its sizes."""
    kind: Fp8Kind = "rows" if block[0] == 1 else "blocks"
    is_on_gpu = values.device.type == "cuda"
    is_meant = rows_in == "everywhere" or (rows_in == "gpu" and is_on_gpu)
    is_whole = not is_on_gpu or not any(size % _MULTIPLES[kind] for size in values.shape)
    return kind if is_meant and is_whole and kind in fp8_kinds(values.device) else "weights"


def fp8_kinds(device: torch.device) -> tuple[Fp8Kind, ...]:
    """Returns the products of FP8 times FP8 that torch has for a device."""
    if device.type != "cuda":
        return ("rows",)
    capability = torch.cuda.get_device_capability(device)
    has: dict[Fp8Kind, bool] = {"rows": capability >= _FP8_ROWS, "blocks": capability[0] == _FP8_BLOCKS}
    return tuple(kind for kind in has if has[kind] and can_multiply(kind, device))


@cache
@torch.inference_mode()
def can_multiply(kind: Fp8Kind, device: torch.device) -> bool:
    """Multiplies ones once, and reports whether it went well: the libraries of torch may lack a product."""
    block = (1, 512) if kind == "rows" else FP8_BLOCK
    values = torch.ones(256, 512, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(256 // block[0], 512 // block[1], device=device)
    rows = torch.ones(5, 512, dtype=torch.bfloat16, device=device)
    try:
        product = Fp8Product.of(Fp8Matrix(values, scales, *block), kind, None)(rows)
    except (RuntimeError, ValueError) as error:
        logger.warning("no FP8 products by %s on %s: %s", kind, device, str(error).partition("\n")[0])
        return False
    return bool((product == 512).all())


def products_text(model: nn.Module) -> str:
    """Says how the quantised matrices of a model are multiplied; empty without any."""
    kinds = Counter(each.fp8_kind for each in model.modules() if isinstance(each, QuantizedLinear))
    told = "".join(f", {count} quantised matrices {_TOLD[kind]}" for kind, count in kinds.items())
    num_mixtures = sum(isinstance(each, QuantizedExperts) for each in model.modules())
    return told + f", experts of {num_mixtures} layers {_TOLD['weights']}" * (num_mixtures > 0)


def product_of(modules: Sequence[QuantizedLinear]) -> QuantizedProduct | Fp8Product:
    """Returns the product with the matrices of modules that `can_merge`, one above the other."""
    parts = {part: _merged(modules, part) for part in modules[0].parts}
    bias, kinds = merged(modules, "bias"), {each.fp8_kind for each in modules}
    if "weight" not in parts:
        return QuantizedProduct(Int4Matrix(parts["packed"], parts["zeros"], parts["scales"]), bias)
    matrix = Fp8Matrix(parts["weight"], parts["scales"], *modules[0].block)
    kind = kinds.pop() if len(kinds) == 1 else "weights"
    return QuantizedProduct(matrix, bias) if kind == "weights" else Fp8Product.of(matrix, kind, bias)


def _merged(modules: Sequence[QuantizedLinear], part: str) -> Tensor:
    whole = merged(modules, part)
    assert whole is not None
    return whole


def quantized_on_load(
    stored: Iterable[StoredTensor], model: Any, name_of: Callable[[str], str | None]
) -> Iterator[StoredTensor]:
    """Says of the weights of a language model's layers that they become FP8, with a scale for each row.

    A weight is stored once and read twice: its values, then its scales. What makes the gates of recurrent
    states stays as it is. Of experts too each row has a scale, whether they are stored one by one or not.
    name_of: the name in the model of a stored tensor.
    """
    names, sizes = {each: name for name, each in model.named_modules()}, dict(model.named_parameters())
    layers = list(model.get_decoder().layers.modules())
    chosen = {f"{names[each]}.weight" for each in layers if isinstance(each, nn.Linear)}
    experts = {f"{names[each]}.{name}" for each in layers for name in EXPERT_MATRICES if hasattr(each, name)}
    for each in stored:
        name = name_of(each.name)
        if name in experts:
            start, _, single = each.name.rpartition(".experts.")
            if joint_part(each.name) is None:
                yield from _in_fp8(each, name, f"{name}{EXPERT_SCALES}", sizes[name].shape)
            else:
                matrix = f"{start}.experts.{single.removesuffix('.weight')}"
                yield from _in_fp8(each, f"{matrix}.weight", f"{matrix}.scales", each.shape)
        elif name in chosen and not name.endswith(_GATES):
            yield from _in_fp8(each, name, f"{name.removesuffix('.weight')}.scales", each.shape)
        else:
            yield each


def _in_fp8(stored: StoredTensor, weight: str, scales: str, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
    """Says that a tensor becomes values in FP8, and scales. weight, scales, shape: as the model has them."""
    block, source = (1, shape[-1]), stored.source or stored.name
    yield replace(stored, form=TensorForm(weight, tuple(shape), torch.float8_e4m3fn, block, "fp8"))
    form = TensorForm(scales, (*shape[:-1], 1), torch.float32, block, "fp8_scales")
    yield replace(stored, name=f"{stored.name}_scale", source=source, form=form)


def quantize_modules(model: nn.Module, forms: Iterable[TensorForm], *, is_weight_only: bool = False) -> None:
    """Replaces the linear modules and experts of a skeleton that these are the forms of, where it has them.

    is_weight_only: whether the files say that rows are not quantised.
    Raises ValueError for a quantised weight of any other module, and for one that does not fit.
    """
    known = model.state_dict(keep_vars=True)
    matrices: defaultdict[str, dict[str, TensorForm]] = defaultdict(dict)
    experts: defaultdict[str, list[TensorForm]] = defaultdict(list)
    for form in forms:
        matrix, _, part = form.name.rpartition(".")
        layer, of_experts, _ = form.name.rpartition(".experts.")
        if of_experts:
            experts[layer].append(form)
        else:
            matrices[matrix][part] = form
    for layer, parts_of_all in experts.items():
        name = name_in_model(f"{layer}.experts.{EXPERT_MATRICES[0]}", known)
        if name is not None:
            quantize_experts(model, name.rpartition(".")[0], parts_of_all)
    for matrix, parts in matrices.items():
        name = name_in_model(f"{matrix}.weight", known)
        if name is not None:  # else it is of another role
            path = name.removesuffix(".weight")
            module = _checked(matrix, model.get_submodule(path), parts)
            model.set_submodule(path, QuantizedLinear(module, parts, is_weight_only=is_weight_only))


def _checked(matrix: str, module: nn.Module, parts: Mapping[str, TensorForm]) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        kind = type(module).__name__
        raise ValueError(f"{matrix} is a quantised {kind}; allowed: linear modules; get another checkpoint")
    rows, columns = parts["weight"].shape if "weight" in parts else parts["packed"].shape
    stored = rows, columns if "weight" in parts else 2 * columns
    if stored != module.weight.shape:
        raise ValueError(f"{matrix} has shape {stored}, the model wants {tuple(module.weight.shape)}")
    return module
