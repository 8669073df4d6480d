"""Lets each question keep only some of the cached visual tokens: MustDrop from its second stage on.

    cache of a video       | v v v v v v v v | held whole, for every question
    layer 0 of a question  | v v v v v v v v | reads all, scores them by what its own text attends
    layer 1                |   v v     v   v | reads the best of those, scores again
    last layers            |     v         v | the survivors
    cache of the answer    | t v v t t |       the survivors and all text, in every layer

While a question is computed nothing is moved: a view lists tokens. Scores are computed for the rows of the
question alone, at the layers that choose, beside the fast attention of the pass. Then text and survivors are
copied to blocks of the request's own, and decode reads those like any others. The layers before the first
prune keep the survivors alone, too, where the paper keeps all there: one block table serves all layers.
Plain operations, the same on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from epd.encoders.device import CPU, arrays_to_device
from epd.encoders.plans import PromptPlan
from epd.reduction import layer_counts
from epd.stages.kernels.scaled_values import unscaled
from epd.stages.rank import Collectives, averaged
from epd.stages.reduction.pruning import at_slots, coarse
from epd.types import BoolArray


class QuestionView:
    """Selects the visual tokens that layers read for one prompt, when its question is computed, at once."""

    _visual: Tensor  # this and the next two from `begin` on, on the device
    _text: Tensor
    _is_key: Tensor

    def __init__(self, prompt: PromptPlan) -> None:
        """Takes a prompt that is reduced by its question."""
        places = [item.token_indices(0, len(item.units)) for item in prompt.media]
        self.start = prompt.prefix_length
        self._places = np.concatenate(places)
        self._guarded = np.zeros(len(self._places), dtype=bool)
        is_text = np.ones(self.start, dtype=bool)
        is_text[self._places] = False
        self._text_places = np.flatnonzero(is_text)
        self._num_survivors = prompt.num_visual_tokens - prompt.num_dropped
        self._counts: tuple[int, ...] = ()  # of each layer, then of those that survive
        self._chosen: list[Tensor] = []  # likewise, into the visual tokens, ascending

    def __getstate__(self) -> dict[str, Any]:
        """Returns what another rank begins with: nothing that is on a device."""
        kept = ("start", "_places", "_guarded", "_text_places", "_num_survivors")
        return {name: getattr(self, name) for name in kept} | {"_counts": (), "_chosen": []}

    def num_read(self) -> tuple[int, ...]:
        """Counts the visual tokens that each layer read when the question was computed."""
        return self._counts[:-1]

    def guard(self, is_key: BoolArray) -> None:
        """Keeps some tokens through every choice, as far as there is room; bool [start], of those before."""
        self._guarded = is_key[self._places]

    def begin(self, num_layers: int, device: torch.device = CPU) -> None:
        """Resets the view, as the question is about to be computed on this device."""
        num_all = len(self._places)
        arrays = [self._places, self._text_places, self._guarded]
        self._visual, self._text, self._is_key = arrays_to_device(arrays, device)
        counts = layer_counts(num_all, self._num_survivors, num_layers)
        self._counts = (*counts, self._num_survivors)
        self._chosen = [torch.arange(num_all, device=device)] * (num_layers + 1)

    def reads_all(self, layer: int) -> bool:
        return len(self._chosen[layer]) == len(self._places)

    def tokens(self, layer: int, num_tokens: int) -> Tensor:
        """Lists which of the first `num_tokens` tokens the layer reads, int64, ascending, on the device."""
        later = torch.arange(self.start, num_tokens, device=self._visual.device)
        return torch.cat([self._text, self._visual[self._chosen[layer]], later]).sort().values

    def survivors(self, num_tokens: int) -> Tensor:
        """Lists which of the first `num_tokens` tokens stay in the cache, as `tokens` does."""
        return self.tokens(len(self._counts) - 1, num_tokens)

    def choose(self, layer: int, weights: Tensor, tokens: Tensor, ranks: Collectives | None = None) -> None:
        """Selects the best of what this layer read for the next, or those that survive.

        weights: [q, K], of each row of the question the attention to each of `tokens`, int64 [K].
        ranks: that have weights of other heads.
        """
        chosen = self._chosen[layer]
        at = torch.searchsorted(tokens, self._visual[chosen])
        best = _best(averaged(weights[:, at], ranks), self._is_key[chosen], self._counts[layer + 1])
        self._chosen[layer + 1] = chosen[best]

    def keep(self, layer: int) -> None:
        """Lets the next layer read what this one did, which does not choose."""
        self._chosen[layer + 1] = self._chosen[layer]

    def is_choosing(self, layer: int) -> bool:
        """Reports whether the layer's attention decides what the next one reads."""
        return self._counts[layer + 1] < self._counts[layer]


def _best(weights: Tensor, is_key: Tensor, num_kept: int) -> Tensor:
    """Selects the tokens that the text attends most, int64 [k], ascending; the key set goes before others.

    weights: [q, K]. is_key: bool [K].

    MustDrop drops a token if the sum over the text is below gamma of the whole sum, and its maximum below
    alpha; in its settings both are about equal (.001 and .001). As that threshold rises tokens fall in the
    order of the larger of the two, and a hard budget keeps those that fall last.
    Source: Liu et al. 2024, section 3.3 (arXiv 2411.10803).
    """
    scores = torch.maximum(weights.sum(0) / weights.sum(), weights.max(0).values)
    ranks = coarse(scores) + (is_key.to(torch.int32) << 30)  # above every score, and those are in order
    return (-ranks).argsort(stable=True)[:num_kept].sort().values


@dataclass(frozen=True, slots=True)
class ViewedRows:
    """Attends packed rows [start, stop) of a pass, which are one question, by its view.

    slots: int64 [context], of all the request's tokens, the question last.
    ranks: that share the heads, and choose by all of them.
    """

    start: int
    stop: int
    slots: Tensor
    view: QuestionView
    ranks: Collectives | None

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor
    ) -> None:
        """Writes to out [T, Hq, D] what the layer's rows of query [T, Hq, D] read.

        keys, values: caches [num_blocks, block_size, Hkv, D]; values may have scaled rows.
        """
        is_choosing = self.view.is_choosing(layer)
        if not is_choosing and self.view.reads_all(layer):
            self.view.keep(layer)
            return
        tokens = self.view.tokens(layer, len(self.slots))
        slots = self.slots[tokens]
        keys, values = (
            unscaled(at_slots(cache, slots), query.dtype).transpose(0, 1)[None] for cache in (keys, values)
        )
        rows = query[self.start : self.stop].transpose(0, 1)[None]
        context = len(self.slots)
        at = torch.arange(context - (self.stop - self.start), context, device=query.device)
        mask = tokens[None] <= at[:, None]
        if not self.view.reads_all(layer):
            read = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
            )
            out[self.start : self.stop] = read[0].transpose(0, 1)
        if is_choosing:
            weights = attention_weights(rows[0], keys[0], mask, scale)
            self.view.choose(layer, weights, tokens, self.ranks)
        else:
            self.view.keep(layer)


def attention_weights(query: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Averages over heads the attention of query [Hq, q, D] to keys [Hkv, K, D]: float32 [q, K]."""
    keys = keys.repeat_interleave(len(query) // len(keys), dim=0)
    scores = (query.float() @ keys.float().transpose(1, 2)) * scale
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).mean(0)


def view_of(prompt: PromptPlan) -> QuestionView | None:
    """Returns the prompt's view; None for a prompt of which the question drops nothing."""
    return QuestionView(prompt) if prompt.num_dropped else None


def question_slots(block_table: NDArray[np.int32], num_tokens: int, block_size: int) -> Tensor:
    """Returns where a request's tokens lie: int64 [num_tokens]."""
    at = np.arange(num_tokens)
    return torch.from_numpy(block_table[at // block_size].astype(np.int64) * block_size + at % block_size)
