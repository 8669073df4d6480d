"""Limits later layers to some tokens of a window: FastKV's token-selective propagation.

    layer   rows that are computed     what its cache keeps
    0       a b c d e f g h            b . d . . .              those that observing rows attend most
    1       a b c d e f g h            . . c d . .              the last one to compute all: c d e g continue
    2       c d e g                    . . c . . g              nothing else is computed, and each layer
    3       c d e g                    . . . d . g              chooses among these

Source: Jo et al. 2025, "FastKV" (arXiv 2502.01068). There the last tokens of the prompt observe: the question
decides once what of the whole prompt continues and each layer keeps, for it alone. Here a video is
computed window by window, before any question is known, and its cache serves all of them. Therefore:

    - a window observes itself. Its end is not a question, and chose worse than chance (docs/reduction.md), so
      rows spread over it observe; a token's score is the mean over those that see it; text is never dropped;
    - all layers keep equally many, so that one block table serves them, and its length is known before a
      frame is decoded. How many continue is a share of its own (there 20 % continue and 10 % are kept), by
      default the same: then the later layers keep all that they compute;
    - in the later layers rows spread over those that continue observe;
    - observing tokens stay only if they are attended like others (there they stay: they are the question);
    - a third of the layers compute all tokens (there about half), which on the embedded model costs nothing;
    - a layer keeps the same tokens for all its heads, and scores of neighbours are not pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epd.stages.rank import averaged
from epd.stages.reduction.pruning import PrunedRows, at_slots, coarse
from epd.stages.reduction.question_views import attention_weights

# Rows of a window whose attention decides. More choose as well; half as many choose worse.
NUM_OBSERVING = 32


@dataclass(slots=True)
class GoingOn:
    """Holds a window's tokens that continue: those attended most in the layer that chose last.

    num_tokens: how many continue, at least those that a layer keeps.
    chosen: int64 [num_tokens], ascending.
    """

    num_tokens: int
    chosen: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class ObservedRows(PrunedRows):
    """Keeps, in each layer, a window's tokens that its observing rows attend most, over all heads together.

    slots: int64 [context], where the request's tokens lie, the window's last.
    going_on: receives what every layer's selection would let continue.
    """

    slots: Tensor
    going_on: GoingOn

    def choose(self, queries: Tensor, keys: Tensor, key_cache: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        num_tokens, context = self.stop - self.start, len(self.slots)
        observing = observing_rows(num_tokens, queries.device)
        seen = at_slots(key_cache, self.slots).transpose(0, 1)
        at = torch.arange(context, device=queries.device)
        mask = at <= (context - num_tokens + observing)[:, None]
        weights = attention_weights(queries[self.start + observing].transpose(0, 1), seen, mask, scale)
        in_window = slice(context - num_tokens, context)
        scores = averaged(weights[:, in_window].sum(0), self.ranks) / mask[:, in_window].sum(0)
        order = (-coarse(scores)).argsort(stable=True)
        self.going_on.chosen = order[: self.going_on.num_tokens].sort().values
        return order[: self.num_kept].sort().values


def observing_rows(num_tokens: int, device: torch.device | None = None) -> Tensor:
    """Spreads observing rows over a window of this length, the last among them: int64 [o], ascending."""
    num_observing = min(NUM_OBSERVING, num_tokens)
    return torch.arange(1, num_observing + 1, device=device) * num_tokens // num_observing - 1


def num_whole_layers(num_layers: int, num_deepstack: int) -> int:
    """Counts the layers that compute all tokens of a window: a third, and all with deepstack features."""
    return min(num_layers, max(1, num_layers // 3, num_deepstack))


def rows_going_on(segments: Sequence[tuple[int, GoingOn | None]], device: torch.device) -> Tensor:
    """Returns the packed rows that continue, int64 [T']; all rows of a segment without a selection."""
    rows, start = [], 0
    for num_rows, window in segments:
        chosen = torch.arange(num_rows, device=device) if window is None else window.chosen
        rows.append(start + chosen)
        start += num_rows
    return torch.cat(rows)
