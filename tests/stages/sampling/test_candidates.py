"""Looking at the likeliest tokens alone draws as looking at all does, or says that it was not enough."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from epd.sampling_params import SamplingParams
from epd.stages.engine import sequence
from epd.stages.sampling import candidates as module
from epd.stages.sampling import sampler
from epd.stages.sampling.candidates import candidates, knobs
from epd.stages.sampling.sampler import SamplingRow, SamplingState, sample
from tests.clear_draws import close_draws

NUM_TOKENS = 4000
SMOOTH = torch.randn(6, NUM_TOKENS, generator=torch.Generator().manual_seed(0))
SCORES = {
    "peaked": SMOOTH * 6,
    "smooth": SMOOTH,
    "flat": torch.zeros(6, NUM_TOKENS),
    "coarse": (SMOOTH * 3).round(),  # many equals
    "few": torch.full((6, NUM_TOKENS), -200.0).index_fill(1, torch.arange(0, 40), 1.0),
}
PARAMS = {
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "low top_p": SamplingParams(temperature=0.7, top_p=0.05),
    "top_k": SamplingParams(temperature=1.0, top_k=40),
    "top_k and top_p": SamplingParams(temperature=1.0, top_k=50, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, top_p=0.95, min_p=0.05),
}


def drawable(
    scores: Tensor, params: SamplingParams, *, is_bounded: bool
) -> tuple[list[dict[int, int]], list[bool]]:
    """Of each row, the weight of each token that has one; and whether that is exact."""
    all_params = [params] * len(scores)
    found = candidates(scores, all_params, torch.from_numpy(knobs(all_params)), is_bounded=is_bounded)
    ids = torch.arange(scores.shape[1]).expand(len(scores), -1) if found.ids is None else found.ids
    rows = [
        {int(i): int(w) for i, w in zip(some, weights, strict=True) if w}
        for some, weights in zip(ids, found.weights, strict=True)
    ]
    exact = [True] * len(scores) if found.is_exact is None else found.is_exact.tolist()
    return rows, exact


@pytest.mark.parametrize("name", list(SCORES))
@pytest.mark.parametrize("kind", list(PARAMS))
def test_a_row_that_is_exact_can_draw_what_all_tokens_can(name: str, kind: str) -> None:
    few, exact = drawable(SCORES[name], PARAMS[kind], is_bounded=True)
    every, _ = drawable(SCORES[name], PARAMS[kind], is_bounded=False)
    assert all(a == b for a, b, is_exact in zip(few, every, exact, strict=True) if is_exact)


def test_rows_whose_share_lies_outside_say_so() -> None:
    _, exact = drawable(SCORES["flat"], PARAMS["top_p"], is_bounded=True)
    assert not any(exact)
    _, exact = drawable(SCORES["flat"], PARAMS["top_k"], is_bounded=True)
    assert not any(exact), "more equals of the last than are looked at"
    for kind in PARAMS:
        assert all(drawable(SCORES["peaked"], PARAMS[kind], is_bounded=True)[1]), kind


@pytest.mark.parametrize("name", list(SCORES))
def test_tokens_are_those_of_a_cpu_also_where_the_likeliest_are_not_enough(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU draws from the likeliest first; what it falls back to is what a CPU does at once."""
    kinds = [*PARAMS.values(), SamplingParams()]
    rows = [
        SamplingRow(SamplingState(params, seed, torch.arange(3).numpy())) for seed, params in enumerate(kinds)
    ]
    expected = sample(SCORES[name], rows)
    num_draws = []
    draw = sampler._draw

    def first_bounded(*args: object, is_bounded: bool) -> object:
        num_draws.append(is_bounded)
        return draw(*args, is_bounded=len(num_draws) == 1)  # type: ignore[arg-type]

    monkeypatch.setattr(sampler, "_draw", first_bounded)
    assert sample(SCORES[name], rows) == expected
    assert len(num_draws) == {"peaked": 1, "flat": 2}.get(name, len(num_draws))


def test_fewer_tokens_than_are_looked_at_need_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUM_CANDIDATES", NUM_TOKENS)
    assert all(drawable(SCORES["flat"], PARAMS["top_p"], is_bounded=True)[1])


def test_a_draw_of_two_almost_level_tokens_is_told_from_others() -> None:
    """Whichever top_p ranks first is drawn where the other would be, far from all borders."""
    rows = [
        SamplingRow(SamplingState(SamplingParams(temperature=1.0, top_p=0.99), seed, np.array([1])))
        for seed in range(64)
    ]
    logits = torch.tensor([[1.0, 1.0 + 1e-6, 0.0, -1.0, -2.0]]).repeat(len(rows), 1)
    with close_draws() as close:
        tokens = [each.token_id for each in sequence.sample(logits, rows)]
    assert set(close) == {seed for seed, token in enumerate(tokens) if token in (0, 1)}
    assert 0 < len(close) < len(rows)
