"""Multiplies rows by a weight matrix: as torch does, or on a CPU by oneDNN.

Measured in float32 on one core of a CPU of AMD, merged matrices of the embedded model and of one with 0.5B
parameters, microseconds:

    rows        1       8       32      256     |   1       8       32      256
    plain       1950    2700    4430    26400   |   4310    10690   20230   112900
    onednn      2500    3070    4280    22800   |   3490     7250   13560    72100
    packed      1890    1850    3110    21400   |   3830     4250   10420    69500

A matrix that is stored the other way round took 1400 and 3080 for one row, and as long as `plain` for more.

oneDNN takes 16 microseconds for a call whatever the size, and half a millisecond or more for the first with a
number of rows that it has not had, for which it makes code. So small matrices are multiplied by `plain`. All
products of a step, of a model whose largest matrix is 64 x 264, and of the embedded one, microseconds:

    rows                        1       2       4       8       16      32      64      256
    tiny: packed                222     216     204     220     227     266     353     637
    tiny: plain                 33      30      41      48      60      84      123     354
    embedded: packed            1078    1093    1156    1388    1862    3208    4686    13205
    the same, plain to 2**17    877     891     1089    1296    2100    3353    4725    13411
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from epd.machine import memory_limit_bytes

# Packed matrices are a copy of the weights, which others may share: of small models it costs little.
_PACKED_MEMORY_SHARE = 0.05
# oneDNN lays a matrix out for this many rows; it does for one row and for thousands, too.
_ROWS = 32
# Elements of a matrix up to which torch's own product is used: those of the embedded model have more.
_SMALL = 2**15

# As torch does it, by oneDNN as the matrix lies in memory, or packed.
LinearKind = Literal["plain", "onednn", "packed"]


class Linear(Protocol):
    """Multiplies rows by a matrix."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [T, N] of rows [T, C]."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Multiplies by the matrix as it is. weight: [N, C]. bias: [N]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.weight, self.bias)


class OneDnnLinear:
    """Multiplies by oneDNN, which for float32 is faster than torch's own choice on many CPUs.

    Packed, the matrix is copied once as oneDNN lays it out for this CPU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_packed: bool) -> None:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight: Tensor = reorder(weight, _ROWS) if is_packed else weight
        self._bias = bias
        self._num_out = len(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        if not rows.shape[0]:
            return rows.new_empty(0, self._num_out)
        multiply = torch.ops.mkldnn._linear_pointwise.default
        product: Tensor = multiply(rows, self._weight, self._bias, "none", [], "")
        return product


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """Multiplies by matrices that cannot be one, such as those of which only some are quantised."""

    parts: tuple[Linear, ...]

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.cat([part(rows) for part in self.parts], dim=1)


def linear_kind(weight: Tensor, num_bytes: int) -> LinearKind:
    """Returns how matrices are multiplied. weight: one of them; num_bytes: of all of them."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_on_cpu = weight.device.type == "cpu" and not isinstance(weight, FakeTensor)
    if not has_onednn or not is_on_cpu or weight.dtype != torch.float32:
        return "plain"
    return "packed" if num_bytes <= _PACKED_MEMORY_SHARE * memory_limit_bytes() else "onednn"


def kind_for(weight: Tensor, kind: LinearKind) -> LinearKind:
    """Returns how one matrix is multiplied in a model whose large matrices are multiplied as `kind` says."""
    return "plain" if weight.numel() <= _SMALL else kind


def linear(weight: Tensor, bias: Tensor | None, kind: LinearKind) -> Linear:
    """Returns what multiplies by a matrix [N, C], and adds a bias [N] if there is one."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if kind == "plain":
        return PlainLinear(weight, bias)
    return OneDnnLinear(weight, bias, is_packed=kind == "packed")
