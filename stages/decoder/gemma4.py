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

from epd.stages.attention.support import MIXED_HEADS
from epd.stages.decoder.experts import Experts
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
    """Adds experts to what the MLP computed.

    router: a module of transformers; see `SparseMlp`.
    norms: of the MLP's rows, of what the experts take, and of what they return.
    ranks: that have channels of each expert.
    """

    router: Any
    experts: Experts
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
    scales: of what is projected, and of the sum.
    """

    embed: Callable[[Tensor], Tensor]
    project: Linear
    norm: RmsNorm
    scales: tuple[float, float]

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Returns [T, L, P] of token ids as they are read, int64 [T], and rows [T, C]."""
        by_row, by_sum = self.scales
        projected = (self.project(hidden) * by_row).view(len(hidden), -1, len(self.norm.weight))
        return (self.norm(projected) + self.embed(token_ids).view_as(projected)) * by_sum


def ids_read(config: Any, device: torch.device) -> Tensor | None:
    """Returns the ids that tokens are embedded by, int64 [V]: of padding for placeholders of media.

    Those of answers too, where they stand for no medium. None for a model that embeds each token as itself.
    config: of a model of transformers.
    """
    text = config.get_text_config()
    if text.model_type not in MIXED_HEADS:
        return None
    kinds = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    ids = torch.arange(text.vocab_size)
    ids[[each for each in kinds if each is not None]] = text.pad_token_id
    return ids.to(device)


def unit_norm(num_channels: int, eps: float, like: Tensor) -> RmsNorm:
    """Returns a norm without weights."""
    return RmsNorm.of(torch.ones(num_channels, dtype=like.dtype, device=like.device), eps)
