"""What a device chooses of a window at once equals what a CPU chooses one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from epd.encoders.reduction.merging import MergedNeighbours, blocks_of, likeness


def rows(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)


def test_blocks_are_as_alike() -> None:
    """Those at the edges are smaller; in some, all or all but one are keys."""
    merged, tokens = MergedNeighbours(5, 7), rows(3, 2, 35, 8)
    is_key = torch.rand(2, 35, generator=torch.Generator().manual_seed(4)) < 0.3
    blocks = blocks_of(5, 7)
    is_key[1, blocks[0]] = True
    is_key[1, blocks[1][1:]] = True
    found = merged._likeness_at_once(tokens, ~is_key).flatten()
    for alike, members in zip(found, merged._members(is_key, are_all=True), strict=True):
        expected = likeness(tokens.flatten(0, 1)[members])
        assert float(alike) == pytest.approx(float(expected), abs=1e-12)
