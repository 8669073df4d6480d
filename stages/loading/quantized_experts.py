"""Replaces the experts of a layer whose matrices are in FP8: all of its experts have them, or none.

files    experts.3.gate_proj.weight [I, C] | experts.3.gate_proj.weight_scale_inv [I / 128, C / 128] | ...
         experts.gate_up_proj [E, 2 I, C]  | experts.gate_up_proj_scale_inv [E, 2 I / 128, C / 128]
memory   gate_up_proj [E, 2 I, C] | gate_up_proj_scales [E, 2 I / 128, C / 128], or [E, 2 I, 1]
         down_proj [E, C, I]      | down_proj_scales [E, C / 128, I / 128], or [E, C, 1]
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from epd.encoders.names import EXPERT_MATRICES, EXPERT_SCALES
from epd.stages.kernels.quantized_plain import Fp8Matrices
from epd.stages.loading.quantized_forms import TensorForm
from epd.types import ceil_div


class QuantizedExperts(nn.Module):
    """Computes what experts of transformers do, from matrices in FP8, which it dequantises.

    block: rows and columns of a matrix that share a scale; None if each row has one.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_scales: nn.Parameter
    down_proj_scales: nn.Parameter

    def __init__(self, theirs: nn.Module, block: tuple[int, int] | None, scales: torch.dtype) -> None:
        """Replaces experts of transformers. scales: their type. Raises ValueError for a block that is cut."""
        super().__init__()
        self._theirs, self.block = (theirs,), block  # of which no parameter is used
        for name in EXPERT_MATRICES:
            shape = theirs.get_parameter(name).shape
            self._register(name, shape, torch.float8_e4m3fn)
            self._register(f"{name}{EXPERT_SCALES}", self._scale_shape(name, shape), scales)

    def matrices(self) -> tuple[Fp8Matrices, Fp8Matrices]:
        """Returns gate and up, one above the other, and down."""
        gate_up, down = (self._matrices(name) for name in EXPERT_MATRICES)
        return gate_up, down

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns [T, C] of rows [T, C]. chosen: int64 [T, K]. weights: [T, K]."""
        plain = (matrices.dequantised(rows.dtype) for matrices in self.matrices())
        parameters = dict(zip(EXPERT_MATRICES, plain, strict=True))
        added: Tensor = functional_call(self._theirs[0], parameters, (rows, chosen, weights))
        return added

    def _register(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> None:
        empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def _scale_shape(self, name: str, shape: Iterable[int]) -> tuple[int, int, int]:
        num_experts, rows, columns = shape
        if self.block is None:
            return num_experts, rows, 1
        if name == EXPERT_MATRICES[0] and rows // 2 % self.block[0]:
            raise ValueError(
                f"experts have {rows // 2} channels, which blocks of {self.block[0]} rows do not divide; "
                "allowed: whole blocks; get another checkpoint"
            )
        return num_experts, ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1])

    def _matrices(self, name: str) -> Fp8Matrices:
        values, scales = (getattr(self, each).detach() for each in (name, f"{name}{EXPERT_SCALES}"))
        return Fp8Matrices(values, scales, *(self.block or (1, values.shape[2])))


def quantize_experts(model: nn.Module, path: str, forms: Iterable[TensorForm]) -> None:
    """Replaces the experts at `path` of a skeleton. forms: of all of their tensors.

    Raises ValueError for values of 4 bits, for experts that are quantised in several ways, and for experts
    with more than matrices.
    """
    theirs, known = model.get_submodule(path), list(forms)
    others = {name for name, _ in theirs.named_parameters()}.difference(EXPERT_MATRICES)
    if others or not known or any(each.dtype == torch.uint8 for each in known):
        raise ValueError(f"{path} are experts with {min(others, default='4 bits')}; allowed: matrices in FP8")
    kinds = {(each.block[0] > 1, each.dtype) for each in known if each.dtype != torch.float8_e4m3fn}
    if len(kinds) != 1:
        raise ValueError(f"{path} has {len(kinds)} kinds of scales; allowed: 1; get another checkpoint")
    ((is_by_block, dtype),) = kinds
    block = next(each.block for each in known) if is_by_block else None
    model.set_submodule(path, QuantizedExperts(theirs, block, dtype))
