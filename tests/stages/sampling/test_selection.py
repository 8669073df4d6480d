"""What is selected without sorting is what sorting everything selects, however scores lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epd.sampling_params import SamplingParams
from epd.stages.sampling import candidates as module
from epd.stages.sampling.candidates import heavy_floor, likeliest, likely_floor, reaching, token_weights

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 30.0]),
    top_k=st.sampled_from([0, 1, 5, 20, 1000]),
    top_p=st.sampled_from([0.01, 0.5, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)
shapes = st.tuples(st.integers(1, 4), st.sampled_from([130, 2600, 5000]))


def drawn_scores(seed: int, shape: tuple[int, int], spread: float, *, ties: bool) -> Tensor:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    return scores.round() if ties else scores


def by_token(scores: Tensor, some: list[SamplingParams]) -> Tensor:
    """int64 [D, V], the weight of every token."""
    weights, ids = token_weights(scores, some)
    if ids is None:
        return weights
    return torch.zeros(scores.shape, dtype=torch.int64).scatter_add(1, ids, weights)


@given(st.integers(0, 2**31), shapes, st.sampled_from([0.01, 1.0, 8.0]), st.booleans(), params)
@settings(deadline=None)
def test_weights_are_those_of_sorting_all(
    seed: int, shape: tuple[int, int], spread: float, ties: bool, one: SamplingParams
) -> None:
    scores = drawn_scores(seed, shape, spread, ties=ties)
    ours = by_token(scores, [one] * len(scores))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "likely_floor", lambda *_: None)
        patch.setattr(module, "heavy_floor", lambda weights, _: torch.zeros_like(weights[:, :1]))
        assert torch.equal(ours, by_token(scores, [one] * len(scores)))


@given(st.integers(0, 2**31), shapes, st.booleans(), st.sampled_from([1, 20]))
@settings(deadline=None)
def test_the_likeliest_are_those_of_a_stable_sort(
    seed: int, shape: tuple[int, int], ties: bool, count: int
) -> None:
    scores = drawn_scores(seed, shape, 3.0, ties=ties)
    values, ids = likeliest(scores, count)
    expected = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :count])
    if likely_floor(scores, count) is not None:
        assert torch.equal(ids, expected.indices[:, :count])


def test_floors_are_reached_by_few_and_by_enough() -> None:
    scores = drawn_scores(0, (3, 5000), 3.0, ties=False)
    low = likely_floor(scores, 10)
    assert low is not None
    assert ((scores >= low).sum(1) >= 10).all()
    assert ((scores >= low).sum(1) < 30).all()
    assert likely_floor(scores, 40) is None, "more than there are blocks"
    weights = (scores.softmax(1) * 2**40).long()
    for part in (0.5, 0.99, 0.9999, 1.0):
        share = weights.sum(1, keepdim=True) * part
        floor = heavy_floor(weights, share)
        assert (floor > 0).all() or part == 1
        assert ((weights * (weights >= floor)).sum(1, keepdim=True) >= share).all()


def test_rows_that_reach_their_floor_less_often_are_filled_up() -> None:
    values = torch.tensor([[5, 1, 7, 7], [0, 9, 0, 1], [2, 2, 2, 2]])
    ids, held = reaching(values, torch.tensor([[5], [9], [2]]), least=-1)
    assert ids.tolist() == [[0, 2, 3, 3], [1, 1, 1, 1], [0, 1, 2, 3]]
    assert held.tolist() == [[5, 7, 7, -1], [9, -1, -1, -1], [2, 2, 2, 2]]
