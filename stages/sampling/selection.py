"""Selects the likely tokens of a vocabulary on a CPU without sorting it: by a floor that they reach.

    scores      | 3 1 7 2 | 9 0 4 1 | 2 2 5 3 |     blocks of the vocabulary
    largest     |    7    |    9    |    5    |     two tokens or more reach 7, the second of these
    reaching 7  tokens 2 and 4, in order of their ids

D rows, V tokens in the vocabulary, K tokens that reach the floor of a row.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Tokens of a block: one pass over all, then a few hundred largest.
_BLOCK = 128
# Floors of weights, tried in turn: the likeliest token weighs 2**40.
_WEIGHT_FLOORS = (2**32, 2**28, 2**24, 2**16)


def likely_floor(scores: Tensor, count: int) -> Tensor | None:
    """Returns a score of each row that at least `count` tokens reach, [D, 1], and few others.

    None where there are not enough blocks to tell.
    """
    num_blocks = scores.shape[1] // _BLOCK  # a short last one is left out: the floor is only lower for it
    if num_blocks < count:
        return None
    maxima = scores[:, : num_blocks * _BLOCK].view(-1, num_blocks, _BLOCK).amax(2)
    return maxima.topk(count).values[:, -1:]


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest scores of each row, descending, and their ids: [D, count].

    On a CPU the first of equals come first, whatever other rows hold.
    """
    floor = likely_floor(scores, count) if scores.device.type == "cpu" else None
    if floor is None:
        return scores.topk(count)
    ids, values = reaching(scores, floor, least=-torch.inf)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order[:, :count])


def heavy_floor(weights: Tensor, share: Tensor) -> Tensor:
    """Returns a weight of each row such that the tokens that reach it weigh `share` or more: int64 [D, 1].

    weights: int64 [D, V]. share: float64 [D, 1].
    """
    floor = torch.zeros(len(weights), 1, dtype=torch.int64)
    for least in _WEIGHT_FLOORS:
        heavy = (weights * (weights >= least)).sum(1, keepdim=True)
        suffices = (heavy >= share) & (floor == 0)
        floor = torch.where(suffices, least, floor)
        if bool(floor.all()):
            break
    return floor


def reaching(values: Tensor, floor: Tensor, *, least: float) -> tuple[Tensor, Tensor]:
    """Returns ids, int64 [D, K], and values [D, K] of the tokens of each row that reach its floor [D, 1].

    Ids ascend. Rows with fewer tokens are filled up: with their last token, and the value `least`.
    """
    flat = np.flatnonzero((values >= floor).numpy())  # in two dimensions NumPy takes eight times as long
    rows, ids = np.divmod(flat, values.shape[1])
    counts = np.bincount(rows, minlength=len(values))
    if len(values) == 1:
        chosen = torch.from_numpy(ids)[None]
        return chosen, values.gather(1, chosen)
    starts = np.cumsum(counts) - counts
    at = starts[:, None] + np.minimum(np.arange(counts.max(initial=1)), counts[:, None] - 1)
    is_filled = torch.from_numpy(np.arange(at.shape[1]) >= counts[:, None])
    chosen = torch.from_numpy(ids[at])
    return chosen, values.gather(1, chosen).masked_fill_(is_filled, least)
