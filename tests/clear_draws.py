"""Truths of drawn tokens that rounding cannot turn.

A drawn token is where a number falls among cumulative weights. The last digits of float32 sums depend on what
is computed together, so a number at the border of two tokens may fall on either side: by 3e-7 of the total in
the tiny checkpoints. A test that compares drawn tokens asks for a truth whose draws all keep clear of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from stages.sampling import sampler

CLEAR = 3e-6  # of the total weight


@contextmanager
def clear_draws() -> Iterator[None]:
    """Fails where a token drawn inside lies closer to its neighbour than CLEAR: then take another seed."""
    distances: list[float] = []
    look_up = sampler._look_up

    def measured(weights: Tensor, number: Tensor) -> Tensor:
        places = look_up(weights, number)
        ends = weights.cumsum(1)
        upper = ends.gather(1, places)
        lower = upper - weights.gather(1, places)
        target = number * ends[:, -1:]
        nearest = torch.minimum((target - lower).where(lower > 0, torch.inf), upper - target)
        distances.extend((nearest / ends[:, -1:])[:, 0].tolist())
        return places

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_look_up", measured)
        yield
    closest = min(distances, default=1.0)
    assert closest > CLEAR, f"a token was drawn {closest:.1e} from its neighbour; use other seeds"
