"""Computes the head that Qwen3.5 has for tokens after the next one (`mtp.*`): one more layer with attention.

A row of it is made of a token, and of what the model's last layer gives for the token before. It lies in the
slot of that one. All rows of a pass but the last of each sequence are known when the pass is, and are written
with it, into one more layer of the cache. So they go wherever blocks go. The last ones follow with drafts:

    tokens of the model      t0      t1      t2                        |  t3, which was sampled
    what its layers give     h0      h1      h2
    rows of the head         t1 h0   t2 h1                 by the pass |  t3 h2 -> t4?   t4 h' -> t5?  ...

A draft needs no exact rows: what is wrong in the cache, such as the last row of a prompt that another worker
has computed, costs drafts that do not hold.
Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epd.stages.attention.attention import AttentionPlan
from epd.stages.decoder.decoder import DecoderInputs, FusedDecoder, LayerCaches
from epd.stages.decoder.layers import layers_of, linear_of
from epd.stages.decoder.linear import Linear
from epd.stages.decoder.operations import RmsNorm
from epd.stages.decoder.text_model import text_model
from epd.stages.loading.draft_modules import draft_modules


def has_draft_head(model: Any) -> bool:
    return draft_modules(model) is not None


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Computes rows of the head.

    norms: of embeddings, and of what the model gives. mix: of both side by side, [2 C] to [C].
    decoder: of its layer and the norm behind. cache: of its keys and values.
    """

    norms: tuple[RmsNorm, RmsNorm]
    mix: Linear
    decoder: FusedDecoder
    cache: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, model: Any, cache: tuple[Tensor, Tensor]) -> DraftHead | None:
        """Takes the head of a model; None for one without."""
        modules = draft_modules(model)
        known = None if modules is None else text_model(model.get_decoder())
        if modules is None or known is None:
            return None
        norms = (modules.pre_fc_norm_embedding, modules.pre_fc_norm_hidden)
        of_embeddings, of_hidden = (RmsNorm.of(each.weight, each.eps, is_centred=True) for each in norms)
        decoder = FusedDecoder(known, layers_of(modules))
        return cls((of_embeddings, of_hidden), linear_of(modules.fc), decoder, cache)

    def write(self, following: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> None:
        """Writes keys and values of T rows.

        following: [T, C], embeddings of the tokens after. hidden: [T, C], what the model gives.
        positions: int64 [rows, T], and plan: of the model's pass.
        """
        self.decoder.write(self._mixed(following, hidden), self._inputs(positions, plan))

    def run(self, following: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Writes rows as `write` does, and returns what the head gives: [T, C], for the model's logits."""
        rows, inputs = self._mixed(following, hidden), self._inputs(positions, plan)
        return self.decoder.run(rows, inputs, range(1))

    def _mixed(self, following: Tensor, hidden: Tensor) -> Tensor:
        return self.mix(torch.cat([self.norms[0](following), self.norms[1](hidden)], dim=1))

    def _inputs(self, positions: Tensor, plan: AttentionPlan) -> DecoderInputs:
        return DecoderInputs(positions, LayerCaches([self.cache], [plan]), positions.new_empty(0))
