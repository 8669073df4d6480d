"""Drops keys and values in each layer as soon as it has computed them: QuickPrefill.

A window of visual tokens is computed whole, behind what the cache keeps of earlier ones. After its attention
a layer moves the chosen keys and values to the front; the block table grows by those alone.

    slots of one layer   | kept so far | a b c d e f g h |        window of 8, written and attended
                         | kept so far | b d g |                  3 kept, others in each layer
    question             | kept so far | b d g | what shape ...

Source: "QuickVideo" (arXiv 2505.16175), QuickPrefill by key norms. No question is looked at, so what is kept
serves every one, and keys keep the rotary positions of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epd.encoders.plans import PromptPlan
from epd.kv.scheduled_request import PrunedRange
from epd.reduction import PREFILL_METHODS, PROPAGATING_METHODS
from epd.stages.rank import Collectives, summed
from epd.stages.visual_inputs import PlacedEmbeddings
from epd.types import Int64Array

# Norms that differ by less than about one in 4000 count as equal: between tokens that look alike, rounding
# would choose, and differently for every batch.
_NORM_BITS = 12
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class WindowInputs:
    """Holds a window as the language model computes it.

    positions: int64 [rows, num_inputs], of all its tokens.
    num_later: tokens that the later layers compute; None for all.
    method: one of PREFILL_METHODS.
    """

    pruned: PrunedRange
    positions: Int64Array
    num_later: int | None
    method: str

    def placed(self, part: PlacedEmbeddings | None) -> PlacedEmbeddings | None:
        """Places the window's embeddings, one after another from the chunk's first token."""
        return PlacedEmbeddings(part.embeddings, np.arange(len(part.embeddings))) if part else None


def window_inputs(prompt: PromptPlan) -> Iterator[WindowInputs]:
    """Lists the windows of a prompt that are reduced in prefill, in order."""
    if prompt.reduction is None or not prompt.reduction.policy.is_in_prefill:
        return
    method = prompt.reduction.policy.method
    for item, positions in zip(prompt.media, prompt.reduction.positions, strict=True):
        start = 0
        for window, place in zip(item.windows, item.units if item.windows else (), strict=True):
            stop = start + window.num_tokens
            pruned = PrunedRange(place.offset, place.stop, window.num_tokens)
            yield WindowInputs(pruned, positions[:, start:stop], window.num_later, method)
            start = stop


@dataclass(frozen=True, slots=True)
class PrunedRows:
    """Prunes packed rows [start, stop) of a pass, a window; each layer keeps `num_kept` of them.

    ranks: that share the heads, and choose by all of them.
    """

    start: int
    stop: int
    num_kept: int
    ranks: Collectives | None

    def choose(self, queries: Tensor, keys: Tensor, key_cache: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """Chooses the window's tokens that one layer keeps, int64 [k], ascending: those of least key norm.

        queries, keys: [T, H, D] of the whole pass, keys as they are cached.
        key_cache: [num_blocks, block_size, Hkv, D], with these keys in it.
        """
        return smallest_keys(keys[self.start : self.stop], self.num_kept, self.ranks)

    def keep(
        self, chosen: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Selects what one layer keeps, and where: keys and values [k, Hkv, D], slots int64 [k].

        keys, values: [T, Hkv, D] of the whole pass. slot_mapping: int64 [T].
        """
        rows = self.start + chosen
        return keys[rows], values[rows], slot_mapping[self.start : self.start + self.num_kept]


# Methods of which all layers compute the same tokens; the others are in `propagation.py`.
ROWS: Mapping[str, type[PrunedRows]] = {"quickprefill": PrunedRows}
assert {*ROWS, *PROPAGATING_METHODS} == set(PREFILL_METHODS)


def at_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Copies what a cache [num_blocks, block_size, Hkv, D] has at slots, int64 [K]: [K, Hkv, D]."""
    block_size = cache.shape[1]
    return cache[slots // block_size, slots % block_size]


def coarse(values: Tensor) -> Tensor:
    """Returns int32, in the order of positive float32 values; those that differ by rounding are equal."""
    return (values.view(torch.int32) + (1 << (_NORM_BITS - 1))) >> _NORM_BITS


def smallest_keys(keys: Tensor, num_kept: int, ranks: Collectives | None = None) -> Tensor:
    """Chooses the keys [n, Hkv, D] of least L2 norm, over all KV heads together: int64 [k], ascending.

    Among equal ones, takes those that come first in a fixed order which is spread over the window.
    """
    norms = summed(keys.float().flatten(1).square().sum(1), ranks).sqrt()
    places = coarse(norms)
    count = torch.arange(len(keys), device=keys.device, dtype=torch.float64)
    spread = (count * _GOLDEN).frac().argsort()
    order = spread[places[spread].argsort(stable=True)]
    return order[:num_kept].sort().values
