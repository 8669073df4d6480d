"""Computes what lies between the matrix products of a layer: by kernels on a GPU, else in plain torch.

The plain twins are written for few operations, each of which costs a CPU microseconds whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from epd.encoders import kernels as shared_kernels
from epd.encoders.kernels.dispatch import uses_kernels
from epd.stages import kernels
from epd.stages.attention.attention import write_kv
from epd.stages.decoder.text_model import TextModel


@dataclass(frozen=True, slots=True)
class Rotations:
    """Holds cosines and sines of a pass, in the type of its rows; each in one piece, as the kernel reads it.

    cos: [T, 1, 1, R / 2]. sin: [T, 1, 2, R / 2], negative for the first half of what is rotated: the first R
    of a head's D channels; of neighbours, for the first of two.
    by_neighbours: whether neighbouring channels are rotated together, and not those of two halves.
    """

    cos: Tensor
    sin: Tensor
    by_neighbours: bool = False

    @classmethod
    def of(cls, model: TextModel, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """Computes them for positions, int64 [rows, T]: three rows for M-RoPE, else one."""
        turned = positions.to(torch.float32)
        if model.row_of_frequency is None or len(turned) == 1:
            angles = turned[0, :, None] * model.inv_freq
        else:
            angles = turned.t().index_select(1, model.row_of_frequency) * model.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if model.rope_scale != 1.0:
            cos, sin = cos * model.rope_scale, sin * model.rope_scale
        both = torch.stack((-sin, sin), dim=1).to(dtype)
        return cls(cos.to(dtype)[:, None, None], both[:, None], model.by_neighbours)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Computes weight * x / sqrt(mean(x^2) + eps).

    weight: [C].
    scaled: float32 [C], the weight times sqrt(C).
    root: float32 [], sqrt(eps * C).
    """

    weight: Tensor
    eps: float
    scaled: Tensor
    root: Tensor

    @classmethod
    def of(cls, weight: Tensor, eps: float, *, is_centred: bool = False) -> RmsNorm:
        """Takes a weight [C]; is_centred: it is what the weight differs from 1 by."""
        weight = weight.detach().float() + 1 if is_centred else weight.detach()
        scaled = weight.to(torch.float32) * len(weight) ** 0.5
        return cls(weight, eps, scaled, scaled.new_full((), (eps * len(weight)) ** 0.5))

    def __call__(self, rows: Tensor) -> Tensor:
        """Norms rows [..., C], in float32, in plain torch."""
        # sqrt(mean(x^2) + eps) is hypot(|x|, sqrt(eps C)) / sqrt(C).
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(rows, length.hypot_(self.root)).mul_(self.scaled).to(rows.dtype)


def add_rms_norm(residual: Tensor, added: Tensor | None, norm: RmsNorm) -> Tensor:
    """Adds to `residual` in place, and returns its norm.

    residual, added: [T, C]; with None nothing is added.
    """
    if uses_kernels(residual):
        normed: Tensor = shared_kernels.add_rms_norm_fused(residual, added, norm.weight, norm.eps)
        return normed
    if added is not None:
        residual.add_(added)
    return norm(residual)


def norm_rotate_write(
    qkv: Tensor,
    heads: tuple[int, int, int],
    norms: tuple[RmsNorm, ...],
    rotations: Rotations,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and rotates queries and keys in place, and writes keys and values to the cache.

    qkv: [T, (Hq + 2 Hkv) * D]. heads: Hq, Hkv, D.
    norms: of queries and of keys, where the model has them, and of values.
    caches: keys and values, [num_blocks, block_size, Hkv, D]. slot_mapping: int64 [T].
    Returns views of qkv: queries [T, Hq, D], keys and values [T, Hkv, D].
    """
    num_heads, num_kv_heads, dim = heads
    split = qkv.view(qkv.shape[0], -1, dim)
    queries, keys, values = split.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if len(norms) > 2:
        values.copy_(norms[2](values))
    if uses_kernels(qkv) and 2 * rotations.cos.shape[-1] == dim and not rotations.by_neighbours:
        weights = (norms[0].weight, norms[1].weight) if norms else None
        eps = norms[0].eps if norms else 0.0
        cos, sin = rotations.cos, rotations.sin
        kernels.norm_rotate_write_fused(
            split, (num_heads, num_kv_heads), weights, eps, cos, sin, caches, slot_mapping
        )
        return queries, keys, values
    if norms:
        queries.copy_(norms[0](queries))
        keys.copy_(norms[1](keys))
    rotate(split[:, : num_heads + num_kv_heads], rotations)
    write_kv(keys, values, *caches, slot_mapping)
    return queries, keys, values


def rotate(rows: Tensor, rotations: Rotations) -> None:
    """Rotates [T, H, D] in place: (a, b) become (a cos - b sin, b cos + a sin), a and b halves of a head.

    Of heads that are rotated in part, halves of their first channels. By neighbours, a and b take turns.
    """
    rotated = rows[..., : 2 * rotations.cos.shape[-1]]
    if rotations.by_neighbours:
        halves = rotated.view(*rows.shape[:2], -1, 2).transpose(2, 3)
    else:
        halves = rotated.view(*rows.shape[:2], 2, -1)
    turned = halves.flip(2).mul_(rotations.sin)
    torch.addcmul(turned, halves, rotations.cos, out=halves)


def split_gates(qkv: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Takes the gates of queries out of a product in which they follow the query of each head.

    qkv: [T, (2 Hq + 2 Hkv) * D]. heads: Hq, Hkv, D.
    Returns qkv without them, [T, (Hq + 2 Hkv) * D], and the gates, [T, Hq * D].
    """
    num_heads, num_kv_heads, dim = heads
    queries, others = torch.split(qkv, [2 * num_heads * dim, 2 * num_kv_heads * dim], dim=1)
    queries, gates = queries.view(-1, num_heads, 2, dim).unbind(2)
    return torch.cat([queries.flatten(1), others], dim=1), gates.flatten(1)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Returns gelu(gate) * up as `silu_mul` does, with the hyperbolic tangent's approximation, in torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate, approximate="tanh").mul_(up)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns silu(gate) * up, [T, I], of gate and up side by side, [T, 2 I]."""
    if uses_kernels(gate_up):
        product: Tensor = shared_kernels.silu_mul_fused(gate_up)
        return product
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)
