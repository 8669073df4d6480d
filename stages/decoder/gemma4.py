"""Computes what layers of Gemma 4 have besides attention and an MLP.

    residual ---- MLP ----+-- norm --+-> residual       experts beside the MLP, with norms of their own
        \\____ experts ____/
    residual * gate, by an embedding of the token for this layer alone --> residual     per-layer embeddings
    residual * scalar --> residual

Source: transformers' Gemma4TextDecoderLayer and Gemma4TextModel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from epd.stages.decoder.linear import Linear
from epd.stages.decoder.operations import RmsNorm
from epd.stages.rank import Collectives, summed


@dataclass(frozen=True, slots=True)
class CappedHead:
    """Bounds logits softly: cap * tanh(logits / cap)."""

    head: Linear
    cap: float

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [R, V] of rows [R, C]."""
        return self.head(rows).div_(self.cap).tanh_().mul_(self.cap)


@dataclass(frozen=True, slots=True)
class ExpertsBeside:
    """Adds experts to what the MLP computed. router, experts: modules of transformers.

    norms: of the MLP's rows, of what the experts take, and of what they return.
    ranks: that have channels of each expert.
    """

    router: Any
    experts: Any
    norms: tuple[RmsNorm, RmsNorm, RmsNorm]
    ranks: Collectives | None

    def __call__(self, rows: Tensor, residual: Tensor) -> Tensor:
        """Returns the MLP's rows [T, C] with those of experts, which take the residual [T, C]."""
        of_mlp, before, behind = self.norms
        _, weights, chosen = self.router(residual)
        added = summed(self.experts(before(residual), chosen, weights), self.ranks)
        return of_mlp(rows).add_(behind(added))


@dataclass(frozen=True, slots=True)
class LayerEmbedding:
    """Adds to the residual what a layer makes of its own embedding of each token.

    gate: [T, P] of the residual. projection: [T, C] of the gated embedding.
    """

    gate: Linear
    projection: Linear
    norm: RmsNorm

    def __call__(self, residual: Tensor, embedded: Tensor) -> Tensor:
        """Returns [T, C] to be added, for embeddings [T, P]."""
        gated = gelu(self.gate(residual), approximate="tanh") * embedded
        return self.norm(self.projection(gated))


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """Embeds tokens for each layer: by their ids, and by their rows before the first layer.

    embed: [T, L * P] of token ids. project: [T, L * P] of rows. norm: of the P channels of one layer.
    padding: id in the place of visual tokens. scales: of what is projected, and of the sum.
    """

    embed: Callable[[Tensor], Tensor]
    project: Linear
    norm: RmsNorm
    padding: int
    scales: tuple[float, float]

    def __call__(self, token_ids: Tensor, hidden: Tensor, visual_rows: Tensor) -> Tensor:
        """Returns [T, L, P] of token ids, int64 [T], and rows [T, C]. visual_rows: int64 [V]."""
        ids = token_ids.index_fill(0, visual_rows, self.padding)
        by_row, by_sum = self.scales
        projected = (self.project(hidden) * by_row).view(len(hidden), -1, len(self.norm.weight))
        return (self.norm(projected) + self.embed(ids).view_as(projected)) * by_sum


def unit_norm(num_channels: int, eps: float, like: Tensor) -> RmsNorm:
    """Returns a norm without weights."""
    return RmsNorm.of(torch.ones(num_channels, dtype=like.dtype, device=like.device), eps)
