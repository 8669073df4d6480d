"""What a device chooses of a window at once equals what a CPU chooses one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from epd.encoders.reduction.at_once import complementary_at_once
from epd.encoders.reduction.merging import MergedNeighbours, blocks_of, likeness
from epd.encoders.reduction.selection import _best_per_unit, complementary


def rows(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("budgets", [(3, 0, 9), (1, 1, 1), (20, 20, 20)])
def test_complementary_tokens_are_the_same(budgets: tuple[int, ...]) -> None:
    tokens, wanted = rows(1, 3, 20, 12), torch.tensor(budgets)
    scores = torch.rand(3, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    turns = complementary_at_once(tokens, scores, int(wanted.max()))
    one_by_one = [
        complementary(*unit, budget) + 20 * number
        for number, (*unit, budget) in enumerate(zip(tokens, scores, budgets, strict=True))
    ]
    assert _best_per_unit(-turns, wanted).tolist() == torch.cat(one_by_one).tolist()


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
