"""How many visual tokens are kept: a plain calculation, known before any frame is decoded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import RequestError
from epd.reduction import (
    KEEP_ALL,
    METHODS,
    ReductionPolicy,
    Window,
    layer_counts,
    num_survivors,
    plan_windows,
)

# Policies


def test_all_tokens_are_kept_unless_a_request_says_otherwise() -> None:
    assert ReductionPolicy("balanced", 1.0) == KEEP_ALL
    assert not KEEP_ALL.is_on
    assert KEEP_ALL.key == ""


@pytest.mark.parametrize("method", METHODS)
def test_every_method_works_in_one_place(method: str) -> None:
    """Before the language model, inside of its prefill, or in each question; at a retention of 1 nowhere."""
    half, whole = ReductionPolicy(method, 0.5), ReductionPolicy(method, 1.0)
    assert half.is_in_prefill + half.is_by_question <= 1
    assert half.is_in_prefill or half.later_share is None
    assert not any((whole.is_in_prefill, whole.later_share, whole.is_by_question))


@pytest.mark.parametrize(
    ("method", "in_prefill", "propagating", "by_question"),
    [
        ("evs", False, False, False),
        ("quickprefill", True, False, False),
        ("fastkv", True, True, False),
        ("mustdrop", False, False, True),
        ("funnel", False, False, True),
    ],
)
def test_where_methods_work(method: str, in_prefill: bool, propagating: bool, by_question: bool) -> None:
    policy = ReductionPolicy(method, 0.3)
    assert (policy.is_in_prefill, policy.later_share is not None, policy.is_by_question) == (
        in_prefill, propagating, by_question,
    )  # fmt: skip


def test_policies_that_keep_other_tokens_have_other_keys() -> None:
    """Encoder caches and prefix caches find by this key."""
    keys = {ReductionPolicy(method, share).key for method in METHODS for share in (0.5, 0.25, 0.2500001)}
    assert len(keys) == 3 * len(METHODS)
    shares = (None, 0.2, 0.25, 1.0)
    assert len({ReductionPolicy("fastkv", 0.1, share).key for share in shares}) == len(shares)
    assert ReductionPolicy("fastkv", 0.1, 0.1).key == ReductionPolicy("fastkv", 0.1).key


@pytest.mark.parametrize(
    ("share", "cached"), [(1.0, 1.0), (0.8, 0.8), (0.5, 0.76), (0.2, 0.6), (0.1, 0.3), (0.05, 0.15)]
)
def test_questions_choose_from_more_than_they_read(share: float, cached: float) -> None:
    assert ReductionPolicy("mustdrop", share).cached_retention == pytest.approx(cached)
    assert ReductionPolicy("evs", share).cached_retention == share


@pytest.mark.parametrize(("share", "computed"), [(1.0, None), (0.9, 0.9), (0.5, 0.76), (0.05, 0.76)])
def test_a_tower_merges_as_the_method_was_published(share: float, computed: float | None) -> None:
    """Alike at every share, so that another one needs no other embeddings; never to less than is kept."""
    assert ReductionPolicy("mustdrop", share).tower_share == pytest.approx(computed)
    assert all(ReductionPolicy(each, share).tower_share is None for each in METHODS if each != "mustdrop")


@pytest.mark.parametrize(
    ("method", "retention", "words"),
    [
        ("magic", 0.5, "received the reduction method 'magic'; allowed: balanced, "),
        ("evs", 0.01, "received a retention of 0.01; allowed: 0.05 to 1"),
        ("evs", 1.5, "received a retention of 1.5"),
        ("evs", float("nan"), "received a retention of nan"),
    ],
)
def test_what_cannot_be_kept_is_refused(method: str, retention: float, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        ReductionPolicy(method, retention)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            ("evs", 0.1, 0.2),
            "received a compute_share of 0.2 with the reduction method evs; allowed: with fastkv",
        ),
        (("fastkv", 0.3, 0.2), "received a compute_share of 0.2; allowed: 0.3, the retention, to 1"),
        (("fastkv", 0.3, 1.2), "received a compute_share of 1.2"),
        (("fastkv", 0.3, float("nan")), "received a compute_share of nan"),
        (("fastkv", 1.0, 0.2), "received a compute_share of 0.2; allowed: 1, the retention, to 1"),
    ],
)
def test_what_cannot_be_computed_is_refused(policy: tuple[str, float, float], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        ReductionPolicy(*policy)
    assert words in str(caught.value)


def test_later_layers_compute_what_is_kept_at_another_retention() -> None:
    policy = ReductionPolicy("fastkv", 0.1, 0.2)
    assert policy.with_retention(0.05) == ReductionPolicy("fastkv", 0.05, 0.2)
    assert policy.with_retention(0.5) == ReductionPolicy("fastkv", 0.5, 0.5)
    assert ReductionPolicy("fastkv", 0.1).with_retention(0.5).later_share == 0.5


# Windows


def test_no_rounding_adds_up_over_windows() -> None:
    """A tenth of 4 tokens is 0.4: every window keeps at least one, and later ones do not keep another."""
    windows = plan_windows([(0, 1), (1, 2), (2, 3), (3, 13)], 4, 0.1)
    assert [window.num_kept for window in windows] == [1, 1, 1, 2]
    assert [window.num_tokens for window in windows] == [4, 4, 4, 40]


def test_a_fraction_is_carried_to_the_next_window() -> None:
    windows = plan_windows([(unit, unit + 1) for unit in range(4)], 10, 0.25)
    assert [window.num_kept for window in windows] == [2, 3, 3, 2]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 70), st.floats(0.05, 1))
def test_windows_keep_the_share_of_all_tokens_to_the_nearest_whole(
    lengths: list[int], tokens_per_unit: int, retention: float
) -> None:
    ends = np.cumsum(lengths).tolist()
    runs = list(zip([0, *ends[:-1]], ends, strict=True))
    windows = plan_windows(runs, tokens_per_unit, retention, later_share=retention)
    assert [window.num_later for window in windows] == [window.num_kept for window in windows]
    num_tokens, later_share = sum(lengths) * tokens_per_unit, min(1.0, 2 * retention)
    windows = plan_windows(runs, tokens_per_unit, retention, later_share=later_share)
    assert sum(window.num_later or 0 for window in windows) >= round(later_share * num_tokens)
    wanted = round(retention * num_tokens)
    assert [(window.start, window.stop) for window in windows] == runs
    assert all(1 <= window.num_kept <= window.num_tokens for window in windows)
    kept = sum(window.num_kept for window in windows)
    assert kept == wanted if all(window.num_kept > 1 for window in windows) else kept >= wanted


@pytest.mark.parametrize(("start", "stop", "kept"), [(0, 0, 1), (-1, 1, 1), (0, 1, 0), (0, 1, 5)])
def test_a_window_that_is_none_cannot_be_made(start: int, stop: int, kept: int) -> None:
    with pytest.raises(ValueError, match="a window keeps 1 to all of the tokens of at least one unit"):
        Window(start, stop, num_tokens=4, num_kept=kept)


# Layers


def test_later_layers_read_fewer_tokens() -> None:
    """32 layers drop at 2, 6, 10 and 14, by one ratio, and the last read half of 1,000 tokens."""
    counts = layer_counts(1000, 500, 32)
    assert counts[14:] == (500,) * 18
    assert counts[:2] == (1000, 1000)
    assert [layer for layer in range(1, 32) if counts[layer] < counts[layer - 1]] == [2, 6, 10, 14]
    ratios = [counts[layer] / counts[layer - 1] for layer in (2, 6, 10, 14)]
    assert ratios == pytest.approx([0.5**0.25] * 4, abs=0.01)


@pytest.mark.parametrize(
    ("retention", "kept", "groups"),
    [
        (192 / 576, 192, [438, 356, 290, 236, 192]),
        (128 / 576, 128, [384, 292, 222, 168, 128]),
        (64 / 576, 64, [192, 146, 111, 84, 64]),
        (0.078, 45, [135, 103, 78, 59, 45]),
    ],
)
def test_published_points_of_mustdrop_are_retentions(retention: float, kept: int, groups: list[int]) -> None:
    """A picture of 576 tokens in 32 layers: what each group of layers reads, the last what was published."""
    policy = ReductionPolicy("mustdrop", retention)
    (window,) = plan_windows([(0, 1)], 576, policy.cached_retention)
    counts = layer_counts(window.num_kept, policy.retention * 576, 32)
    assert [counts[layer] for layer in (0, 2, 6, 10, 14)] == groups
    assert counts[14:] == (kept,) * 18


def test_a_model_of_one_layer_reads_all() -> None:
    assert layer_counts(100, 50, 1) == (100,)


@given(
    num_cached=st.integers(1, 2000), share=st.floats(0, 1.2), num_layers=st.sampled_from([1, 2, 6, 28, 36])
)
def test_the_last_layers_read_what_survives(num_cached: int, share: float, num_layers: int) -> None:
    counts = layer_counts(num_cached, share * num_cached, num_layers)
    assert len(counts) == num_layers
    assert list(counts) == sorted(counts, reverse=True)
    assert counts[0] == num_cached
    if num_layers > 1:
        wanted = round(share * num_cached)
        assert counts[-1] == num_survivors(num_cached, share * num_cached) == min(max(wanted, 1), num_cached)
