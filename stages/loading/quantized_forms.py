"""Says in which form each tensor of a quantised matrix is kept, and brings it to that from the files' form.

A matrix [N, C]; with 4 bits, groups of G columns share a scale and a zero point. All begin with the rows, so
that matrices are merged by their rows as any others are:

    files   FP8     weight [N, C] | weight_scale_inv or weight_scale [N / 128, C / 128], [N, 1] or [1]
            experts, if not one by one: gate_up_proj, down_proj [E, N, C] | the same with an end, _scale_inv
                    [E, N / 128, C / 128]; or all of these [E, C, N]
            AWQ     qweight int32 [C, N / 8] | qzeros int32 [C / G, N / 8] | scales [C / G, N]
            GPTQ    qweight int32 [C / 8, N] | qzeros, scales as AWQ's
            packed  weight_packed int32 [N, C / 8] | weight_scale [N, C / G] | weight_shape int64 [2], or
                    weight_zero_point int32 [N / 8, C / G]
    memory  FP8     weight [N, C] | scales [N / 128, C / 128] or [N, 1]; of experts see `quantized_experts.py`
            4 bits  packed uint8 [N, C / 2] | zeros uint8 [N, C / G] | scales [N, C / G]

A byte of `packed` has a column of the first half of its group in its low bits, and the one that is G / 2
further right in its high bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from epd.encoders.names import EXPERT_MATRICES, EXPERT_SCALES
from epd.encoders.quantization import Quantization
from epd.stages.kernels.quantized_plain import fp8_rows_plain
from epd.types import ceil_div

# What is done to a stored tensor: nothing, one scale is given to each row, or a layout is taken apart: first
# AWQ's, then that of words along columns or rows, whose values follow each other. Zero points that lie a step
# too low, as GPTQ first wrote them, are raised; those of symmetric values are in the middle. Weights that are
# not quantised become FP8, and the scales of that.
Step = Literal[
    "none", "for_each_row", "packed", "zeros", "turned",
    "packed_down", "packed_across", "zeros_across", "raised_zeros_across", "zeros_down", "middle",
    "fp8", "fp8_scales",
]  # fmt: skip
_MIDDLE = 8  # the value of 4 bits that stands for 0 where there are no zero points
# AWQ has eight values in a word, and these are the four bits of it that column 0, 1, ... of the eight has.
_PLACE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
_SCALES = ("weight_scale_inv", "weight_scale", "scales")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Describes what a stored tensor becomes.

    name, shape, dtype: in the model.
    block: rows and columns of its matrix that share a scale.
    kept: a dimension of what became FP8, whose scales are those of whole rows, and [start, stop) of what is
        kept of it; None for all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, int]
    step: Step = "none"
    kept: tuple[int, tuple[tuple[int, int], ...]] | None = None

    def of(self, stored: Tensor) -> Tensor:
        """Returns the stored tensor in this form."""
        if self.step == "for_each_row":
            return stored.reshape(-1, 1).expand(self.shape).contiguous()
        if self.step == "middle":
            return torch.full(self.shape, _MIDDLE, dtype=self.dtype, device=stored.device)
        if self.step in ("fp8", "fp8_scales"):
            whole = self._in_fp8(stored) if stored.ndim == 2 else torch.stack([*map(self._in_fp8, stored)])
            dim, ranges = self.kept or (0, ())
            parts = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
            return torch.cat(parts, dim) if parts else whole
        if self.step in _VALUES:
            values = _VALUES[self.step](stored)[: self.shape[0]]
            return pack(values, self.block[1]) if "packed" in self.step else values.contiguous()
        return stored.t().contiguous() if self.step == "turned" else stored

    def _in_fp8(self, matrix: Tensor) -> Tensor:
        """Returns values or scales of a matrix [N, C], which may be turned."""
        rows = matrix if matrix.shape[1] == self.block[1] else matrix.t()
        values, scales = fp8_rows_plain(rows, rows.shape[1])
        return (scales if self.step == "fp8_scales" else values)[: len(rows)].contiguous()


@dataclass(frozen=True, slots=True)
class _Stored:
    shape: tuple[int, ...]
    dtype: torch.dtype


def forms_of(
    stored: Mapping[str, tuple[Sequence[int], torch.dtype]], quantization: Quantization
) -> dict[str, TensorForm]:
    """Returns the forms of all tensors of quantised matrices, by the names of the files.

    stored: shapes and types by name, in the files' forms or in ours.
    Raises ValueError for tensors that do not belong together.
    """
    known = {name: _Stored(tuple(shape), dtype) for name, (shape, dtype) in stored.items()}
    forms: dict[str, TensorForm] = {}
    for name, tensor in known.items():
        matrix, _, part = name.rpartition(".")
        if part == "weight" and tensor.dtype == torch.float8_e4m3fn:
            forms.update(_fp8_forms(matrix, known, quantization))
        elif part in EXPERT_MATRICES and tensor.dtype == torch.float8_e4m3fn:
            forms.update(_expert_forms(name, known, quantization))
        elif part == "qweight":
            forms.update(_turned_forms(matrix, known, quantization))
        elif part == "weight_packed":
            forms.update(_compressed_forms(matrix, known, quantization))
        elif part == "packed":
            forms.update(_packed_forms(matrix, known))
    return forms


def _fp8_forms(
    matrix: str, known: Mapping[str, _Stored], quantization: Quantization
) -> Iterator[tuple[str, TensorForm]]:
    weight = known[f"{matrix}.weight"]
    names = [name for name in (f"{matrix}.{part}" for part in _SCALES) if name in known]
    if len(names) != 1:
        raise ValueError(f"{matrix}.weight is of FP8 and has {len(names)} tensors of scales; allowed: 1")
    (name,), (rows, columns) = names, weight.shape
    scales = known[name]
    block, kept = (1, columns), f"{matrix}.scales"
    if math.prod(scales.shape) == 1 or scales.shape in ((rows,), (rows, 1)):
        form = TensorForm(kept, (rows, 1), scales.dtype, block, "for_each_row")
    else:
        block = quantization.block or block
        _check_shape(name, scales, (ceil_div(rows, block[0]), ceil_div(columns, block[1])))
        form = TensorForm(kept, scales.shape, scales.dtype, block)
    yield f"{matrix}.weight", TensorForm(f"{matrix}.weight", weight.shape, weight.dtype, block)
    yield name, form


def _expert_forms(
    name: str, known: Mapping[str, _Stored], quantization: Quantization
) -> Iterator[tuple[str, TensorForm]]:
    """Returns the forms of experts that are all in one tensor, whichever way their matrices are turned."""
    weight, kept = known[name], f"{name}{EXPERT_SCALES}"
    found = kept if kept in known else f"{name}_scale_inv"
    scales, block = _found(found, known), quantization.block
    if block is None or len(weight.shape) != 3 or any(size % block[0] for size in weight.shape[1:]):
        raise ValueError(f"{name} is of FP8 and has shape {weight.shape}; allowed: experts of whole blocks")
    num_experts, rows, columns = weight.shape
    _check_shape(found, scales, (num_experts, rows // block[0], columns // block[1]))
    yield name, TensorForm(name, weight.shape, weight.dtype, block)
    yield found, TensorForm(kept, scales.shape, scales.dtype, block)


def _turned_forms(
    matrix: str, known: Mapping[str, _Stored], quantization: Quantization
) -> Iterator[tuple[str, TensorForm]]:
    """Returns the forms of AWQ's and of GPTQ's tensors, which have the matrix the other way round."""
    weight, zeros, scales = (_found(f"{matrix}.{part}", known) for part in ("qweight", "qzeros", "scales"))
    is_awq = quantization.method == "awq"
    _check_words(f"{matrix}.qweight", weight, quantization)
    columns, rows = weight.shape[0] * (1 if is_awq else 8), weight.shape[1] * (8 if is_awq else 1)
    num_groups = _num_groups(f"{matrix}.qweight", columns, quantization)
    _check_shape(f"{matrix}.qzeros", zeros, (num_groups, ceil_div(rows, 8)))
    _check_shape(f"{matrix}.scales", scales, (num_groups, rows))
    taken: Step = "raised_zeros_across" if quantization.has_low_zeros else "zeros_across"
    steps: tuple[Step, Step] = ("packed", "zeros") if is_awq else ("packed_down", taken)
    stored: list[tuple[str, Step]] = [("qweight", steps[0]), ("qzeros", steps[1]), ("scales", "turned")]
    return _int4_forms(matrix, (rows, columns, num_groups), scales.dtype, stored)


def _compressed_forms(
    matrix: str, known: Mapping[str, _Stored], quantization: Quantization
) -> Iterator[tuple[str, TensorForm]]:
    weight, scales = (_found(f"{matrix}.{part}", known) for part in ("weight_packed", "weight_scale"))
    if f"{matrix}.weight_g_idx" in known:
        raise ValueError(f"{matrix} has weight_g_idx, groups of columns that do not follow each other")
    _check_words(f"{matrix}.weight_packed", weight, quantization)
    rows, columns = weight.shape[0], 8 * weight.shape[1]
    num_groups = _num_groups(f"{matrix}.weight_packed", columns, quantization)
    _check_shape(f"{matrix}.weight_scale", scales, (rows, num_groups))
    # Symmetric values have no zero points. What else lies there for each matrix stands for them.
    zeros: tuple[str, Step] = ("weight_shape", "middle")
    if quantization.has_zeros:
        zeros = ("weight_zero_point", "zeros_down")
    points = _found(f"{matrix}.{zeros[0]}", known)
    if quantization.has_zeros:
        _check_shape(f"{matrix}.{zeros[0]}", points, (ceil_div(rows, 8), num_groups))
    stored: list[tuple[str, Step]] = [("weight_packed", "packed_across"), zeros, ("weight_scale", "none")]
    return _int4_forms(matrix, (rows, columns, num_groups), scales.dtype, stored)


def _check_words(name: str, weight: _Stored, quantization: Quantization) -> None:
    if quantization.block is None or weight.dtype != torch.int32 or len(weight.shape) != 2:
        raise ValueError(
            f"{name} is {weight.dtype} {weight.shape}, which is not the layout of {quantization.method}"
        )


def _num_groups(name: str, columns: int, quantization: Quantization) -> int:
    assert quantization.block is not None
    num_groups, rest = divmod(columns, quantization.block[1])
    if rest:
        raise ValueError(
            f"{name} has {columns} columns, which groups of {quantization.block[1]} do not divide"
        )
    return num_groups


def _int4_forms(
    matrix: str,
    sizes: tuple[int, int, int],
    scales: torch.dtype,
    stored: Sequence[tuple[str, Step]],
) -> Iterator[tuple[str, TensorForm]]:
    """Returns the forms of values, zero points and scales, of these names and steps. sizes: N, C, C / G."""
    rows, columns, num_groups = sizes
    block = (1, columns // num_groups)
    kept = (
        ("packed", columns // 2, torch.uint8),
        ("zeros", num_groups, torch.uint8),
        ("scales", num_groups, scales),
    )
    for (name, step), (part, width, dtype) in zip(stored, kept, strict=True):
        yield f"{matrix}.{name}", TensorForm(f"{matrix}.{part}", (rows, width), dtype, block, step)


def _packed_forms(matrix: str, known: Mapping[str, _Stored]) -> Iterator[tuple[str, TensorForm]]:
    packed, zeros, scales = (_found(f"{matrix}.{part}", known) for part in ("packed", "zeros", "scales"))
    block = (1, 2 * packed.shape[1] // zeros.shape[1])
    for part, tensor in (("packed", packed), ("zeros", zeros), ("scales", scales)):
        yield f"{matrix}.{part}", TensorForm(f"{matrix}.{part}", tensor.shape, tensor.dtype, block)


def _found(name: str, known: Mapping[str, _Stored]) -> _Stored:
    if name not in known:
        raise ValueError(f"the tensor {name} is missing; get all of the files")
    return known[name]


def _check_shape(name: str, stored: _Stored, wanted: tuple[int, ...]) -> None:
    if stored.shape != wanted:
        raise ValueError(f"{name} has shape {stored.shape}, its matrix wants {wanted}")


def awq_values(words: Tensor) -> Tensor:
    """Returns the values of AWQ's words, uint8 [M, N] of int32 [M, N / 8]."""
    pairs = words.contiguous().view(torch.uint8)
    values = torch.stack((pairs & 15, pairs >> 4), -1).view(len(words), -1, 8)
    return values[..., list(_PLACE_OF_COLUMN)].flatten(1)


def word_values(words: Tensor) -> Tensor:
    """Returns the values of words in which they follow each other, uint8 [M, N] of int32 [M, N / 8]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).view(len(words), -1)


# Values, [N, C] or [N, C / G], by the step that takes them out of words.
_VALUES: Mapping[Step, Callable[[Tensor], Tensor]] = {
    "packed": lambda words: awq_values(words).t(),
    "zeros": lambda words: awq_values(words).t(),
    "packed_down": lambda words: word_values(words.t()),
    "packed_across": word_values,
    "zeros_across": lambda words: word_values(words).t(),
    "raised_zeros_across": lambda words: (word_values(words).t() + 1) & 15,
    "zeros_down": lambda words: word_values(words.t()).t(),
}


def pack(values: Tensor, group: int) -> Tensor:
    """Returns values of 4 bits, uint8 [N, C], two in a byte: [N, C / 2]."""
    halves = values.reshape(len(values), -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
