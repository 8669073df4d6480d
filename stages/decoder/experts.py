"""Computes mixtures of experts: each row is multiplied by the matrices of the experts that it chose alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.stages.decoder.linear import Linear
from epd.stages.decoder.operations import gelu_mul, silu_mul
from epd.stages.kernels.quantized_plain import Fp8Matrices
from epd.stages.loading.quantized_experts import QuantizedExperts
from epd.stages.rank import Collectives, summed


@dataclass(frozen=True, slots=True)
class Experts:
    """Holds the matrices of E experts: gate_up [E, 2 I, C], gate above up, and down [E, C, I].

    Both are in FP8, or none is.
    """

    gate_up: Tensor | Fp8Matrices
    down: Tensor | Fp8Matrices
    activate: Callable[[Tensor], Tensor] = silu_mul

    @classmethod
    def of(cls, module: Any, activate: Callable[[Tensor], Tensor] = silu_mul) -> Experts:
        """Takes those of a module of transformers, or of quantised ones."""
        if isinstance(module, QuantizedExperts):
            return cls(*module.matrices(), activate)
        return cls(module.gate_up_proj.detach(), module.down_proj.detach(), activate)

    def __call__(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Returns [T, C] of rows [T, C]: of each what its K experts make of it, times their weights.

        chosen: int64 [T, K]. weights: [T, K].
        """
        if not uses_kernels(rows):
            return experts_plain(rows, self, chosen, weights)
        matrices, is_gelu = (self.gate_up, self.down), self.activate is gelu_mul
        added: Tensor = kernels.experts_fused(rows, matrices, chosen, weights, is_gelu=is_gelu)
        return added

    def warm_up(self, rows: Tensor, weights: Tensor) -> None:
        """Launches the kernels of decodes and of chunks. rows: [1, C], weights: [1, K], of their types."""
        for num_pairs in (1, 1 + kernels.num_few_pairs(len(self.down))):
            chosen = torch.zeros(num_pairs, 1, dtype=torch.int64, device=rows.device)
            self(rows.expand(num_pairs, -1), chosen, weights[:, :1].expand(num_pairs, -1))


def experts_plain(rows: Tensor, experts: Experts, chosen: Tensor, weights: Tensor) -> Tensor:
    """Computes the same in plain torch, which reads no expert that nobody chose either."""
    ids, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(len(experts.down), device=rows.device)
    ends = torch.searchsorted(ids, numbers, right=True, out_int32=True)
    hidden = _products(rows[order // chosen.shape[1]], experts.gate_up, ids, ends)
    found = _products(experts.activate(hidden), experts.down, ids, ends)
    added = found.new_empty(*chosen.shape, found.shape[1])
    added.flatten(0, 1)[order] = found
    return added.mul_(weights[..., None]).sum(1)


def _products(rows: Tensor, matrices: Tensor | Fp8Matrices, ids: Tensor, ends: Tensor) -> Tensor:
    """Returns [P, N] of rows [P, C], each by the matrix of its id; FP8 is dequantised before.

    ids: int64 [P], in order. ends: int32 [E], of each expert the row behind its last.
    """
    if isinstance(matrices, Fp8Matrices):
        if len(ids) < len(matrices):  # those that are chosen alone, though some of them twice
            return torch.bmm(matrices[ids].dequantised(rows.dtype), rows[:, :, None])[:, :, 0]
        matrices = matrices.dequantised(rows.dtype)
    return grouped_mm(rows, matrices.transpose(1, 2), offs=ends)


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Adds up what a row's experts make of it, and a shared expert.

    router: a module of transformers, of which of rows [T, C] the weights [T, K] of its choice are the second
        result, and the numbers of the chosen experts, int64 [T, K], the third.
    gate: [T, 1] of rows [T, C], whose sigmoid the shared expert is multiplied by, if the model has one.
    ranks: that have channels of each expert.
    """

    router: Any
    experts: Experts
    shared: Callable[[Tensor], Tensor] | None
    gate: Linear | None
    ranks: Collectives | None

    def __call__(self, rows: Tensor) -> Tensor:
        _, weights, chosen = self.router(rows)
        added = self.experts(rows, chosen, weights)
        if self.shared is not None:
            share, gate = self.shared(rows), None if self.gate is None else self.gate(rows).sigmoid()
            added = added.add_(share) if gate is None else added.addcmul_(share, gate)
        return summed(added, self.ranks)
