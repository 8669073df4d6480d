"""Computes gated delta layers of Qwen3.5: what stands in the place of attention in three of four layers.

rows -> projection | queries, keys, values -> convolution, SiLU | gates | decays | strengths
                   -> delta rule -> norm of each head, times SiLU of its gate -> output matrix

Between the products a GPU launches three kernels, and two more for long runs: see `stages/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.stages.decoder.delta_rule import CHUNK, DeltaInputs, DeltaPlan
from epd.stages.decoder.linear import Linear
from epd.stages.decoder.operations import RmsNorm

# Added to the squares of a head's channels before the root.
_LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Describes the heads. Each head of queries and keys serves as many heads of values as any other."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_channels(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Returns how many channels are convolved."""
        return 2 * self.key_channels + self.value_channels


def delta_sizes(config: Any) -> DeltaSizes:
    """Reads a text configuration of transformers."""
    return DeltaSizes(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Computes a layer up to its output matrix.

    projection: by the matrices of `DELTA`, in that order. filters: float32 [K, channels].
    rates, steps: float32 [H], of which the decays are made. norm: of a head's values.
    """

    sizes: DeltaSizes
    projection: Linear
    filters: Tensor
    rates: Tensor
    steps: Tensor
    norm: RmsNorm

    @classmethod
    def of(cls, module: Any, config: Any, projection: Linear) -> GatedDelta:
        """Takes the parameters of a module of transformers."""
        return cls(
            delta_sizes(config),
            projection,
            module.conv1d.weight.detach()[:, 0].t().float().contiguous(),
            module.A_log.detach().float().exp().neg_(),
            module.dt_bias.detach().float(),
            RmsNorm.of(module.norm.weight, config.rms_norm_eps),
        )

    def __call__(self, rows: Tensor, tails: Tensor, matrices: Tensor, plan: DeltaPlan) -> Tensor:
        """Returns [T, H * Dv] of normed rows [T, C]. tails, matrices: of all slots, see `DeltaPlan`."""
        projected = self.projection(rows)
        attended = plan.attend(self.inputs(projected, tails, plan), matrices)
        start = self.sizes.num_channels
        return self.gated(attended, projected[:, start : start + self.sizes.value_channels])

    def warm_up(self, tails: Tensor, matrices: Tensor) -> None:
        """Launches the kernels of short runs and of chunks. tails, matrices: of all slots, which stay."""
        sizes, starts = self.sizes, np.array([0, 1, 1 + CHUNK], np.int32)
        width = sizes.num_channels + sizes.value_channels
        projected = tails.new_zeros(1 + CHUNK, width + 2 * sizes.num_heads)
        plan = DeltaPlan.build(starts, [(None, -1, 0)] * 2, matrices.device)
        attended = plan.attend(self.inputs(projected, tails, plan), matrices)
        self.gated(attended, projected[:, sizes.num_channels : width])

    def inputs(self, projected: Tensor, tails: Tensor, plan: DeltaPlan) -> DeltaInputs:
        """Convolves projected rows [T, channels + H * Dv + 2 H], and makes what the rule takes of them."""
        sizes = self.sizes
        if uses_kernels(projected):
            heads = sizes.num_key_heads, sizes.num_heads, sizes.key_dim, sizes.value_dim
            of_rows = self.filters, self.rates, self.steps
            made = kernels.delta_inputs_fused(projected, of_rows, tails, plan.work.pieces, heads, _LENGTH_EPS)
            return DeltaInputs(*made)
        widths = [sizes.num_channels, sizes.value_channels, sizes.num_heads, sizes.num_heads]
        mixed, _, strengths, decays = torch.split(projected, widths, dim=1)
        mixed = silu(plan.plain.convolve(mixed, self.filters, tails).to(projected.dtype))
        widths = [sizes.key_channels, sizes.key_channels, sizes.value_channels]
        queries, keys, values = torch.split(mixed.float(), widths, dim=1)
        return DeltaInputs(
            self._directions(queries) * sizes.key_dim**-0.5,
            self._directions(keys),
            values.view(-1, sizes.num_heads, sizes.value_dim),
            self.rates * softplus(decays.float() + self.steps),
            strengths.sigmoid().float(),
        )

    def gated(self, attended: Tensor, gates: Tensor) -> Tensor:
        """Norms what the rule gives, float32 [T, H, Dv], and gates it: [T, H * Dv], of the gates' type."""
        if uses_kernels(gates):
            gated: Tensor = kernels.gate_norm_fused(attended, gates, self.norm.weight, self.norm.eps)
            return gated
        normed = self.norm(attended.to(gates.dtype)).flatten(1)
        return (normed * silu(gates.float())).to(gates.dtype)

    def _directions(self, rows: Tensor) -> Tensor:
        """Returns [T, Hk, Dk] of length 1."""
        heads = rows.reshape(-1, self.sizes.num_key_heads, self.sizes.key_dim)
        return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _LENGTH_EPS)


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Holds one layer. mixer: in the place of attention. mlp: [T, C] of normed rows [T, C]."""

    attention_norm: RmsNorm
    mixer: GatedDelta
    out: Linear
    mlp_norm: RmsNorm
    mlp: Callable[[Tensor], Tensor]
