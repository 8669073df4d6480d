"""Reads from hidden states what they are to know by then, with linear layers that are thrown away."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from epd.shapes import COLOURS, SHAPES
from epd.shapes.stories import MOTIONS
from training.lane_batches import Batch
from training.lanes import TOKENS
from training.rows import NO_TARGET

_EVENT_WEIGHT = torch.tensor(5.0)
_FAR = 0.2
# After so many layers visual tokens and the names of shapes are to know what is read.
_EVENT_LAYERS = (2, 3, 4)
_NAME_LAYERS = (3, 4, 5)


class EventProbes(nn.Module):
    """Reads from visual tokens what appears, what has left, how far it fell and how many came before."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.appears, self.left = nn.Linear(hidden_size, len(SHAPES)), nn.Linear(hidden_size, len(SHAPES))
        self.fallen, self.ordinal = nn.Linear(hidden_size, 1), nn.Linear(hidden_size, len(SHAPES))

    def losses(self, batch: Batch, states: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns how far off each is. states: hidden states after each layer, [T, C]."""
        is_visual = batch.visual[batch.is_token]
        first, second, third = (states[number - 1][is_visual] for number in _EVENT_LAYERS)
        seen, one = batch.events, batch.events.is_one
        fallen = self.fallen(third[one])[:, 0] - seen.fallen[one] / _FAR
        return {
            "appears": 5 * _events_loss(self.appears(first), seen.appears),
            "left": 5 * _events_loss(self.left(second), seen.left),
            "fallen": fallen.square().mean(),
            "ordinal": functional.cross_entropy(self.ordinal(third[one]), seen.ordinal[one]),
        }


def _events_loss(logits: Tensor, happened: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        logits, happened, pos_weight=_EVENT_WEIGHT.to(happened.device)
    )


class NameProbes(nn.Module):
    """Reads from the names of shapes, in questions and answers, what is true of the shape."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.shown = nn.Linear(hidden_size, 2)
        sizes = (len(COLOURS), TOKENS, len(MOTIONS), hidden_size, hidden_size)
        self.facts = nn.ModuleList(nn.Linear(hidden_size, size) for size in sizes)

    def losses(self, batch: Batch, states: Sequence[Tensor], table: Tensor) -> dict[str, Tensor]:
        """Returns how far off each is. table: embeddings [V, C]; times are compared with those of tokens."""
        named = batch.mentions
        first, second, third = (states[number - 1][named.at] for number in _NAME_LAYERS)
        known = (first, first, third, second, second)
        logits = [layer(state) for layer, state in zip(self.facts, known, strict=True)]
        logits[3:] = [functional.linear(each.bfloat16(), table.bfloat16()).float() for each in logits[3:]]
        names = ("colour", "lane", "motion", "from", "to")
        losses = {
            name: _certain_loss(each, facts)
            for name, each, facts in zip(names, logits, named.facts.T, strict=True)
        }
        return {"shown": functional.binary_cross_entropy_with_logits(self.shown(first), named.shown)} | losses


def _certain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean loss where there is a target, 0 where there is none."""
    total = functional.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
    return total / (targets != NO_TARGET).sum().clamp(min=1)
