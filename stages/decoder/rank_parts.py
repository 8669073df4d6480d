"""Computes with a rank's part of matrices, of which all ranks together have the whole.

columns of a product    QKV, gate and up: a rank has some rows of the matrix, and nothing is exchanged
sums of a product       output and down: a rank has some columns, and the products are added up
vocabulary              a rank embeds its token ids and others' as 0, added up; logits are gathered
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from epd.stages.decoder.linear import Linear
from epd.stages.rank import Collectives, Rank


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """Multiplies a rank's columns of the rows by its columns of a matrix, and adds up what the ranks have.

    bias: [N], the whole one, added once.
    """

    part: Linear
    bias: Tensor | None
    ranks: Collectives

    def __call__(self, rows: Tensor) -> Tensor:
        product = self.part(rows)
        self.ranks.add_up(product)
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True, slots=True)
class SplitEmbedding:
    """Embeds token ids of which a rank has a part. weight: [V of the rank, C]. num_ids: V of all ranks."""

    weight: Tensor
    num_ids: int
    ranks: Collectives

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Returns [T, C] for int64 [T]."""
        start, stop = self.ranks.rank.part(self.num_ids)
        is_elsewhere = (token_ids < start) | (token_ids >= stop)
        rows = functional.embedding((token_ids - start).clamp_(0, stop - start - 1), self.weight)
        rows.masked_fill_(is_elsewhere[:, None], 0)
        self.ranks.add_up(rows)
        return rows


@dataclass(frozen=True, slots=True)
class GatheredHead:
    """Computes logits of which a rank has a part. num_ids: V of all ranks."""

    part: Linear
    num_ids: int
    ranks: Collectives

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns [R, V] of rows [R, C] to rank 0, and [R, 0] to others."""
        size = self.ranks.rank.size
        counts = [
            stop - start for start, stop in (Rank(each, size).part(self.num_ids) for each in range(size))
        ]
        logits = self.part(rows)
        if not len(rows):
            return logits.new_empty(0, self.num_ids)
        padded = functional.pad(logits, (0, max(counts) - logits.shape[1])).contiguous()
        parts = self.ranks.gather(padded)
        if not parts:
            return logits[:, :0]
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)
