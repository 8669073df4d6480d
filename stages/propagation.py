"""Windows of which only some tokens go on through the later layers: FastKV's token-selective propagation.

    layer   rows that are computed     what its cache keeps
    0       a b c d e f g h            b . d . . . g .          those that the last tokens attend most
    1       a b c d e f g h            . b c . . . g .
    2       a b c d e f g h            a . . d . . g .          the layer that chooses: these go on
    3 ...   a d g                      a d g                    nothing else is computed

Source: Jo et al. 2025, "FastKV" (arXiv 2502.01068). There the last tokens of the prompt observe: the question
decides, once, what of the whole prompt goes on and what each layer keeps, for it alone. Here a video is
computed window by window, before any question is known, and its cache serves all of them. Therefore:

    - the last tokens of each window observe, and choose among that window's tokens; text is never dropped;
    - one share holds for what goes on and for what is kept (there 20 % and 10 %), so that all layers' caches
      are equally long: one block table serves them, and its length is known before a frame is decoded;
    - observing tokens stay only if they are attended like others (there they stay: they are the question);
    - a layer keeps the same tokens for all its heads, and scores of neighbours are not pooled.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stages.pruning import PrunedRows, coarse
from stages.question_views import attention_weights

# Tokens at a window's end whose attention decides.
NUM_OBSERVING = 8


@dataclass(slots=True)
class GoingOn:
    """Which tokens of a window go on, ascending, int64 [k]: those that the last layer to choose has kept."""

    chosen: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class ObservedRows(PrunedRows):
    """Of a window each layer keeps the tokens that the last ones attend most, over all heads together.

    slots: int64 [context], where the request's tokens lie, the window's last. going_on: told every choice.
    """

    slots: Tensor
    going_on: GoingOn

    def choose(self, queries: Tensor, keys: Tensor, key_cache: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        num_tokens, context = self.stop - self.start, len(self.slots)
        num_observing = min(NUM_OBSERVING, num_tokens)
        observing = queries[self.stop - num_observing : self.stop].transpose(0, 1)
        seen = key_cache.flatten(0, 1)[self.slots].transpose(0, 1)
        at = torch.arange(context, device=queries.device)
        mask = at <= at[context - num_observing :, None]
        scores = attention_weights(observing, seen, mask, scale)[:, context - num_tokens :].mean(0)
        order = (-coarse(scores)).argsort(stable=True)
        self.going_on.chosen = order[: self.num_kept].sort().values
        return self.going_on.chosen


def num_whole_layers(num_layers: int, num_deepstack: int) -> int:
    """How many layers compute all tokens of a window: half of them, and all that deepstack features go to."""
    return max(1, num_layers // 2, num_deepstack)


def cut_decoder(decoder: nn.Module, num_layers: int) -> tuple[nn.Module, nn.Module]:
    """The same decoder as two that are run one after the other: its first `num_layers`, and the rest.

    They share the weights. The first gives what the second takes as `inputs_embeds`.
    """
    layers: Any = decoder.layers
    first, rest = copy.copy(decoder), copy.copy(decoder)
    for piece, part in ((first, layers[:num_layers]), (rest, layers[num_layers:])):
        piece._modules = {**decoder._modules, "layers": part}
    first.norm = nn.Identity()
    return first, rest


def rows_going_on(segments: Sequence[tuple[int, GoingOn | None]], device: torch.device) -> Tensor:
    """int64 [T']: of packed segments, each of so many rows, those that go on; all of one without a choice."""
    rows, start = [], 0
    for num_rows, window in segments:
        chosen = torch.arange(num_rows, device=device) if window is None else window.chosen
        rows.append(start + chosen)
        start += num_rows
    return torch.cat(rows)
