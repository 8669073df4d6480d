"""How many tokens are kept is planned exactly; which ones depends on the past of the video alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.encoders import Embeddings, Grid, MediaItem, MediaPlan
from epd.encoders.groups import _units
from epd.encoders.reduction import Kept, TokenReducer
from epd.encoders.reduction.selection import Balanced, Funnel, ItemOutline, UniformPooling, new_method
from epd.errors import RequestError
from epd.reduction import QUESTION_METHODS, SELECTION_METHODS, ReductionPolicy, Window, plan_windows
from epd.types import PlaceholderRange

NUM_UNITS, TOKENS_PER_UNIT, CHANNELS = 12, 9, 8
RUNS = [(0, 5), (5, 10), (10, NUM_UNITS)]


def item_of(windows: tuple[Window, ...]) -> MediaItem:
    """A video whose windows stand one behind the other at the start of a prompt."""
    plan = MediaPlan("video", (84, 84), Grid(NUM_UNITS, 6, 6), 2, TOKENS_PER_UNIT, tuple(np.arange(24.0)))
    ends = np.cumsum([window.num_kept for window in windows])
    ranges = tuple(
        PlaceholderRange(int(end) - window.num_kept, window.num_kept)
        for end, window in zip(ends, windows, strict=True)
    )
    return MediaItem(plan, ranges, windows)


def some_rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(NUM_UNITS * TOKENS_PER_UNIT, CHANNELS, generator=torch.Generator().manual_seed(seed))


def kept_of(method: str, retention: float, rows: torch.Tensor, cuts: list[int]) -> list[Kept]:
    """What is kept when the units come in runs that end at `cuts`."""
    windows = plan_windows(RUNS, TOKENS_PER_UNIT, retention)
    reducer = TokenReducer(ReductionPolicy(method, retention), item_of(windows))
    edges = [0, *cuts, NUM_UNITS]
    return [
        kept
        for start, stop in pairwise(edges)
        for kept in reducer.push(Embeddings(rows[start * TOKENS_PER_UNIT : stop * TOKENS_PER_UNIT]))
    ]


@pytest.mark.parametrize("method", SELECTION_METHODS)
@settings(max_examples=25, deadline=None)
@given(retention=st.floats(0.05, 0.99), cuts=st.sets(st.integers(1, NUM_UNITS - 1)), seed=st.integers(0, 99))
def test_kept_tokens_are_as_many_as_planned_however_the_units_arrive(
    method: str, retention: float, cuts: set[int], seed: int
) -> None:
    rows = some_rows(seed)
    whole, parts = kept_of(method, retention, rows, []), kept_of(method, retention, rows, sorted(cuts))
    windows = plan_windows(RUNS, TOKENS_PER_UNIT, retention)
    assert [len(kept.indices) for kept in whole] == [window.num_kept for window in windows]
    for window, kept, other in zip(windows, whole, parts, strict=True):
        assert np.array_equal(kept.indices, other.indices)
        assert torch.equal(kept.embeddings.rows, other.embeddings.rows)
        assert (np.diff(kept.indices) > 0).all()
        assert window.start * TOKENS_PER_UNIT <= kept.indices[0]
        assert kept.indices[-1] < window.stop * TOKENS_PER_UNIT


@pytest.mark.parametrize("method", sorted(set(SELECTION_METHODS) - {"uniform"}))
def test_what_is_kept_is_unchanged(method: str) -> None:
    rows = some_rows()
    for kept in kept_of(method, 0.3, rows, [3]):
        assert torch.equal(kept.embeddings.rows, rows[torch.from_numpy(kept.indices)])


@pytest.mark.parametrize("method", SELECTION_METHODS)
def test_later_windows_do_not_change_earlier_ones(method: str) -> None:
    rows, others = some_rows(0), some_rows(1)
    others[: 5 * TOKENS_PER_UNIT] = rows[: 5 * TOKENS_PER_UNIT]
    first, second = kept_of(method, 0.3, rows, []), kept_of(method, 0.3, others, [])
    assert np.array_equal(first[0].indices, second[0].indices)


@pytest.mark.parametrize("method", SELECTION_METHODS + QUESTION_METHODS)
def test_a_reading_is_reduced_without_the_one_before(method: str) -> None:
    rows, start = some_rows(), RUNS[1][0]
    windows = plan_windows(RUNS, TOKENS_PER_UNIT, 0.3, reading_starts={start})
    assert [window.begins_reading for window in windows] == [True, True, False]
    policy, item = ReductionPolicy(method, 0.3), item_of(windows)
    _, *expected = TokenReducer(policy, item).push(Embeddings(rows))
    part = replace(item, units=item.units[1:], windows=windows[1:])
    alone = list(TokenReducer(policy, part).push(Embeddings(rows[start * TOKENS_PER_UNIT :])))
    for ours, theirs in zip(alone, expected, strict=True):
        assert np.array_equal(ours.indices, theirs.indices)
        assert np.array_equal(ours.is_key, theirs.is_key)
        assert torch.equal(ours.embeddings.rows, theirs.embeddings.rows)


def test_pooling_gives_the_mean_of_each_run() -> None:
    rows = torch.arange(12.0)[:, None].expand(-1, 2)
    pooling = UniformPooling()
    chosen = pooling.choose(rows.view(3, 4, 2), 5)
    assert torch.equal(pooling.merge(rows, chosen)[:, 0], torch.tensor([0.5, 2.5, 5.0, 7.5, 10.0]))
    assert chosen.tolist() == [0, 2, 5, 7, 10]


@pytest.mark.parametrize("method", ["balanced", "evs"])
def test_what_appears_before_a_still_background_is_kept(method: str) -> None:
    """One new token in each of the later units, somewhere else each time."""
    background = torch.randn(1, TOKENS_PER_UNIT, CHANNELS, generator=torch.Generator().manual_seed(3))
    units = background.repeat(NUM_UNITS, 1, 1)
    places = [(unit, (2 * unit) % TOKENS_PER_UNIT) for unit in range(4, NUM_UNITS)]
    for unit, place in places:
        units[unit, place] = -background[0, place]
    chosen = new_method(method, ItemOutline()).choose(units, 3 * NUM_UNITS)
    kept = {divmod(int(index), TOKENS_PER_UNIT) for index in chosen}
    assert set(places) <= kept


def test_balanced_remembers_the_background_of_earlier_windows() -> None:
    """What came after the first window and stays is usual in the second, but not in the video."""
    background = torch.randn(1, TOKENS_PER_UNIT, CHANNELS, generator=torch.Generator().manual_seed(3))
    first = background.repeat(NUM_UNITS, 1, 1)
    second = first.clone()
    second[:, 4] = -background[0, 4]
    method = Balanced()
    method.choose(first, NUM_UNITS)
    chosen = method.choose(second, NUM_UNITS)
    assert (chosen % TOKENS_PER_UNIT).tolist() == [4] * NUM_UNITS


def test_balanced_keeps_what_stays_at_a_place_for_nearly_half_of_an_item() -> None:
    """In a mean it would be a part of the background, and what is there without it would stand out, too."""
    background, thing = torch.eye(CHANNELS)[:2]
    units = background.repeat(NUM_UNITS, TOKENS_PER_UNIT, 1)
    units[:5, 4] = units[7:, 7] = thing
    chosen = Balanced(sees_all=True).choose(units, NUM_UNITS)
    kept = {divmod(int(index), TOKENS_PER_UNIT) for index in chosen}
    assert {*((unit, 4) for unit in range(5)), *((unit, 7) for unit in range(7, NUM_UNITS))} <= kept


def test_a_window_that_is_all_shares_nothing_with_the_first_of_several() -> None:
    """Other tokens are kept of it, since more is known of its background."""
    windows = plan_windows(RUNS, TOKENS_PER_UNIT, 0.3)
    alone, first, same = (
        next(_units(item_of(some), "clip", "")) for some in (windows[:1], windows, windows[:2])
    )
    assert alone[0] == first[0]
    assert alone[1] != first[1]
    assert first == same


def test_balanced_keeps_of_every_unit_even_where_all_happens_in_one() -> None:
    units = some_rows().view(NUM_UNITS, TOKENS_PER_UNIT, CHANNELS)[:1].repeat(NUM_UNITS, 1, 1)
    units[6] = -units[6]
    for num_kept in (NUM_UNITS, 2 * NUM_UNITS + 5):
        chosen = Balanced().choose(units, num_kept)
        counts = torch.bincount(chosen // TOKENS_PER_UNIT, minlength=NUM_UNITS)
        assert counts.max() - counts.min() <= 1


def test_balanced_tells_what_stands_still_from_time_to_time() -> None:
    """Two tokens that never change in a still picture: each is kept in turns, though one of a unit is."""
    still = torch.randn(1, 2, CHANNELS, generator=torch.Generator().manual_seed(3))
    method = Balanced()
    for _ in range(3):
        chosen = method.choose(still.repeat(NUM_UNITS, 1, 1), NUM_UNITS)
        assert torch.equal((chosen % 2).diff().abs(), torch.ones(NUM_UNITS - 1, dtype=torch.int64))


def test_a_funnel_keeps_what_balanced_does_and_marks_the_best_of_every_unit() -> None:
    rows = some_rows().view(NUM_UNITS, TOKENS_PER_UNIT, CHANNELS)
    funnel, balanced, num_kept, num_keys = Funnel(1 / 3), Balanced(), 0, 0
    for start, stop in RUNS:
        here = 4 * (stop - start) + 2
        chosen = funnel.choose(rows[start:stop], here)
        assert torch.equal(chosen, balanced.choose(rows[start:stop], here))
        is_key = funnel.is_key(chosen)
        keys = torch.bincount(chosen[is_key] // TOKENS_PER_UNIT, minlength=stop - start)
        assert keys.max() - keys.min() <= 1
        num_kept, num_keys = num_kept + here, num_keys + int(is_key.sum())
        assert num_keys == round(num_kept / 3), "what rounding takes from a window the next one gets"


def test_what_stands_out_is_the_key_of_a_funnel() -> None:
    background = torch.randn(1, TOKENS_PER_UNIT, CHANNELS, generator=torch.Generator().manual_seed(3))
    units = background.repeat(NUM_UNITS, 1, 1)
    places = torch.arange(NUM_UNITS) * TOKENS_PER_UNIT + torch.arange(NUM_UNITS) * 2 % TOKENS_PER_UNIT
    units.view(-1, CHANNELS)[places] *= -1
    funnel = Funnel(0.25, sees_all=True)
    chosen = funnel.choose(units, 4 * NUM_UNITS)
    assert torch.equal(chosen[funnel.is_key(chosen)], places)
    assert not Balanced().is_key(chosen).any(), "other methods have none"


@pytest.mark.parametrize(("method", "retention"), [("magic", 0.5), ("evs", 0.0), ("evs", 1.2)])
def test_policies_that_are_none_say_what_is_allowed(method: str, retention: float) -> None:
    with pytest.raises(RequestError, match="allowed"):
        ReductionPolicy(method, retention)
