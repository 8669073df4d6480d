"""Ceilings of requests: each amount is refused above its own, by name; nothing grows with what is claimed."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.control.request_budget import (
    RequestBudget,
    RequestLimits,
    check_json_size,
    check_num_frames,
    check_num_pixels,
    check_visual_tokens,
)
from epd.errors import RequestBudgetError, RequestError
from epd.sampling_params import MAX_CHOICES

LIMITS = RequestLimits().for_model(context_tokens=32_768, longest_token_bytes=16)
AMOUNTS = [field.name for field in fields(RequestBudget)]
ENORMOUS = st.integers(0, 2**80)
budgets = st.builds(RequestBudget, **dict.fromkeys(AMOUNTS, ENORMOUS))


def is_refused(budget: RequestBudget, limits: RequestLimits = LIMITS) -> bool:
    try:
        budget.check(limits)
    except RequestBudgetError:
        return True
    return False


@pytest.mark.parametrize("amount", AMOUNTS)
def test_each_amount_has_a_ceiling_that_the_error_names(amount: str) -> None:
    with pytest.raises(
        RequestBudgetError, match=r"received \d[\d,]* .*; allowed [\d,]+ \(max_\w+\); "
    ) as error:
        RequestBudget(**{amount: 2**62}).check(LIMITS)
    ceiling = str(error.value).partition("(")[2].partition(")")[0]
    allowed: int = getattr(LIMITS, ceiling)
    assert f"received {2**62:,} " in str(error.value)
    RequestBudget(**{amount: allowed}).check(LIMITS)
    assert is_refused(RequestBudget(**{amount: allowed + 1}))


@given(budget=budgets, amount=st.sampled_from(AMOUNTS), more=ENORMOUS)
def test_asking_for_more_is_never_allowed_where_less_is_not(
    budget: RequestBudget, amount: str, more: int
) -> None:
    larger = replace(budget, **{amount: getattr(budget, amount) + more})
    assert is_refused(larger) >= is_refused(budget)


@given(budget=budgets, context=st.integers(1, 2**20), less=st.integers(0, 2**20), chars=st.integers(1, 256))
def test_a_smaller_context_never_allows_more(
    budget: RequestBudget, context: int, less: int, chars: int
) -> None:
    limits, smaller = (
        RequestLimits().for_model(tokens, chars) for tokens in (context, max(1, context - less))
    )
    assert is_refused(budget, smaller) >= is_refused(budget, limits)


@given(budget=budgets, frames=st.floats(), tokens=ENORMOUS, pixels=ENORMOUS)
def test_checks_allocate_nothing_from_what_is_claimed(
    budget: RequestBudget, frames: float, tokens: int, pixels: int
) -> None:
    tracemalloc.start()
    try:
        for check in (
            lambda: budget.check(LIMITS),
            lambda: check_num_frames(frames, LIMITS.max_frames),
            lambda: check_num_pixels(pixels, LIMITS),
            lambda: check_visual_tokens(tokens, 0.5, 32_768),
        ):
            with contextlib.suppress(RequestBudgetError):
                check()
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_ceilings_follow_the_context_of_the_model() -> None:
    small = RequestLimits().for_model(context_tokens=100, longest_token_bytes=8)
    assert small.max_text_bytes == 800
    assert small.max_frames == 4000  # two of a frame share a token, of which a twentieth is kept
    assert small.max_answer_tokens == 100 * MAX_CHOICES
    large = RequestLimits(max_answer_tokens=500).for_model(1 << 20, 128)
    assert large == replace(RequestLimits(), max_answer_tokens=500)


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True])
def test_a_limit_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match=r"received the limit max_frames=.*; allowed: an integer of at"):
        RequestLimits(max_frames=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("frames", [65_537, 1e308, float("inf"), float("nan")])
def test_more_frames_than_the_ceiling(frames: float) -> None:
    with pytest.raises(RequestBudgetError, match="allowed 65,536"):
        check_num_frames(frames, 65_536)
    check_num_frames(65_536, 65_536)


@pytest.mark.parametrize(
    ("num_tokens", "retention", "fits"),
    [(99, 1.0, True), (100, 1.0, False), (200, 0.5, True), (500, 0.5, False), (3000, 0.05, True)],
)
def test_media_that_cannot_fit_the_context(num_tokens: int, retention: float, fits: bool) -> None:
    """Half of the share is granted for rounding: windows keep whole tokens."""
    if fits:
        check_visual_tokens(num_tokens, retention, 100)
        return
    with pytest.raises(RequestBudgetError, match="visual tokens"):
        check_visual_tokens(num_tokens, retention, 100)


@given(st.recursive(st.none() | st.text(",[{", max_size=5), st.lists, max_leaves=40), st.integers(1, 60))
def test_json_is_counted_before_it_is_parsed(value: object, allowed: int) -> None:
    """Never fewer than the elements that a parser would make."""
    body = json.dumps(value).encode()
    if num_elements(value) > allowed + 1:
        with pytest.raises(RequestBudgetError, match="members and elements"):
            check_json_size(body, RequestLimits(max_json_values=allowed))


def num_elements(value: object) -> int:
    return 1 + (sum(map(num_elements, value)) if isinstance(value, list) else 0)


def test_twenty_million_integers_are_refused_at_a_glance() -> None:
    body = b"1," * 20_000_000

    def peak() -> int:
        tracemalloc.start()
        try:
            with pytest.raises(RequestBudgetError):
                check_json_size(body, LIMITS)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert min(peak() for _ in range(3)) < 10_000, "whatever other threads allocated meanwhile"
