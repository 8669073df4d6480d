"""Reads from hidden states what they are to know by then, with linear layers that are thrown away."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from epd.shapes import COLOURS, SHAPES
from training.lane_batches import Batch
from training.lane_mentions import Mentions
from training.lane_scenes import UNTIMED
from training.lanes import TOKENS
from training.rows import NO_TARGET
from training.stories import MOTIONS

_EVENT_WEIGHT = torch.tensor(5.0)
_FAR = 0.2
_MOTION_WEIGHT = 4.0
# After so many layers visual tokens are to know what is read; names of shapes; and what goes on about one.
_EVENT_LAYERS = (2, 3, 4)
NAME_LAYERS = (3, 4, 5)
SUBJECT_LAYERS = (4, 5, 6)
_SHAPE_LAYER = 2


class EventProbes(nn.Module):
    """Reads from visual tokens what appears, what has left, how far it fell and how many came before.

    And where it was: a name that looks at what has left and at what appears can tell how it moved.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.appears, self.left = nn.Linear(hidden_size, len(SHAPES)), nn.Linear(hidden_size, len(SHAPES))
        self.fallen, self.ordinal = nn.Linear(hidden_size, 1), nn.Linear(hidden_size, len(SHAPES))
        self.clock, self.before = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.height = nn.Linear(hidden_size, 1)

    def losses(self, batch: Batch, states: Sequence[Tensor], numbers: Tensor) -> dict[str, Tensor]:
        """Returns how far off each is.

        states: hidden states after each layer, [T, C]. numbers: embeddings of whole seconds, [N, C].
        """
        is_visual = batch.visual[batch.is_token]
        first, second, third = (states[number - 1][is_visual] for number in _EVENT_LAYERS)
        seen, one, was_one = batch.events, batch.events.is_one, batch.events.was_one
        height = self.height(second[was_one])[:, 0] - seen.height[was_one]
        fallen = self.fallen(third[one])[:, 0] - seen.fallen[one] / _FAR
        return {
            "appears": 5 * _events_loss(self.appears(first), seen.appears),
            "left": 5 * _events_loss(self.left(second), seen.left),
            "height": _MOTION_WEIGHT * _mean_square(height),
            "fallen": _MOTION_WEIGHT * _mean_square(fallen),
            "ordinal": functional.cross_entropy(self.ordinal(third[one]), seen.ordinal[one]),
            "clock": _token_loss(self.clock(first), numbers, seen.seconds[:, 0], UNTIMED),
            "before": _token_loss(self.before(second), numbers, seen.seconds[:, 1], UNTIMED),
        }


def _mean_square(errors: Tensor) -> Tensor:
    """Returns 0 for none."""
    return errors.square().sum() / max(1, len(errors))


def _events_loss(logits: Tensor, happened: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        logits, happened, pos_weight=_EVENT_WEIGHT.to(happened.device)
    )


class MentionProbes(nn.Module):
    """Reads what is true of a shape from tokens of questions and answers that name it or go on about it."""

    def __init__(self, hidden_size: int, layers: tuple[int, int, int]) -> None:
        """layers: after so many, what it is and where is known; then when; then how it moved."""
        super().__init__()
        self._layers = layers
        self.shape, self.shown = nn.Linear(hidden_size, len(SHAPES)), nn.Linear(hidden_size, 2)
        sizes = (len(COLOURS), TOKENS, len(MOTIONS), hidden_size, hidden_size)
        self.facts = nn.ModuleList(nn.Linear(hidden_size, size) for size in sizes)

    def losses(self, mentions: Mentions, states: Sequence[Tensor], table: Tensor) -> dict[str, Tensor]:
        """Returns how far off each is.

        states: hidden states after each layer, [T, C]. table: embeddings [V, C]; times are compared with
        those of tokens.
        """
        first, second, third = (states[number - 1][mentions.at] for number in self._layers)
        known = (first, first, third, second, second)
        facts = mentions.facts.T
        read = [layer(state) for layer, state in zip(self.facts, known, strict=True)]
        losses = [_certain_loss(*each) for each in zip(read[:3], facts[:3], strict=True)]
        losses += [_token_loss(*each) for each in zip(read[3:], [table] * 2, facts[3:], strict=True)]
        shown = functional.binary_cross_entropy_with_logits(self.shown(first), mentions.shown)
        shape = _certain_loss(self.shape(states[_SHAPE_LAYER - 1][mentions.at]), mentions.shape)
        names = ("shape", "shown", "colour", "lane", "motion", "from", "to")
        return dict(zip(names, [shape, shown, *losses], strict=True))


def _token_loss(read: Tensor, table: Tensor, targets: Tensor, ignored: int = NO_TARGET) -> Tensor:
    """Returns the loss of the embedding [N, C] that is nearest to what is read, [M, C]."""
    return _certain_loss(functional.linear(read.bfloat16(), table.bfloat16()).float(), targets, ignored)


def _certain_loss(logits: Tensor, targets: Tensor, ignored: int = NO_TARGET) -> Tensor:
    """Returns the mean loss where there is a target, 0 where there is none."""
    total = functional.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum")
    return total / (targets != ignored).sum().clamp(min=1)
