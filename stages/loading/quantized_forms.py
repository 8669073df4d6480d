"""Says in which form each tensor of a quantised matrix is kept, and brings it to that from the files' form.

A matrix [N, C]; with 4 bits, groups of G columns share a scale and a zero point. All begin with the rows, so
that matrices are merged by their rows as any others are:

    files   FP8     weight [N, C] | weight_scale_inv or weight_scale [N / 128, C / 128], [N, 1] or [1]
            AWQ     qweight int32 [C, N / 8] | qzeros int32 [C / G, N / 8] | scales [C / G, N]
    memory  FP8     weight [N, C] | scales [N / 128, C / 128] or [N, 1]
            4 bits  packed uint8 [N, C / 2] | zeros uint8 [N, C / G] | scales [N, C / G]

A byte of `packed` has a column of the first half of its group in its low bits, and the one that is G / 2
further right in its high bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from epd.encoders.quantization import Quantization
from epd.types import ceil_div

# What is done to a stored tensor: nothing, one scale is given to each row, or AWQ's layout is taken apart.
Step = Literal["none", "for_each_row", "packed", "zeros", "turned"]
# AWQ has eight values in a word, and these are the four bits of it that column 0, 1, ... of the eight has.
_PLACE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
_SCALES = ("weight_scale_inv", "weight_scale", "scales")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Describes what a stored tensor becomes.

    name, shape, dtype: in the model.
    block: rows and columns of its matrix that share a scale.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, int]
    step: Step = "none"

    def of(self, stored: Tensor) -> Tensor:
        """Returns the stored tensor in this form."""
        if self.step == "for_each_row":
            return stored.reshape(-1, 1).expand(self.shape).contiguous()
        if self.step == "packed":
            return pack(awq_values(stored).t(), self.block[1])
        if self.step == "zeros":
            return awq_values(stored).t().contiguous()
        return stored.t().contiguous() if self.step == "turned" else stored


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
        elif part == "qweight":
            forms.update(_awq_forms(matrix, known, quantization))
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


def _awq_forms(
    matrix: str, known: Mapping[str, _Stored], quantization: Quantization
) -> Iterator[tuple[str, TensorForm]]:
    weight, zeros, scales = (_found(f"{matrix}.{part}", known) for part in ("qweight", "qzeros", "scales"))
    if quantization.block is None or weight.dtype != torch.int32 or len(weight.shape) != 2:
        raise ValueError(f"{matrix}.qweight is {weight.dtype} {weight.shape}, which is not the layout of AWQ")
    block, byte = quantization.block, torch.uint8
    columns, rows = weight.shape[0], 8 * weight.shape[1]
    num_groups, rest = divmod(columns, block[1])
    if rest:
        raise ValueError(f"{matrix}.qweight has {columns} columns, which groups of {block[1]} do not divide")
    _check_shape(f"{matrix}.qzeros", zeros, (num_groups, rows // 8))
    _check_shape(f"{matrix}.scales", scales, (num_groups, rows))
    turned = (rows, num_groups)
    values = TensorForm(f"{matrix}.packed", (rows, columns // 2), byte, block, "packed")
    yield f"{matrix}.qweight", values
    yield f"{matrix}.qzeros", TensorForm(f"{matrix}.zeros", turned, byte, block, "zeros")
    yield f"{matrix}.scales", TensorForm(f"{matrix}.scales", turned, scales.dtype, block, "turned")


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


def pack(values: Tensor, group: int) -> Tensor:
    """Returns values of 4 bits, uint8 [N, C], two in a byte: [N, C / 2]."""
    halves = values.reshape(len(values), -1, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
