"""Drafts: those that repeat what came before, and as many as pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.kv.drafting import DraftGain, PromptLookup

tokens = st.lists(st.integers(0, 3), max_size=30)


def proposal(known: list[int], max_draft: int, lookup: PromptLookup | None = None) -> list[int]:
    return (lookup or PromptLookup()).propose(np.array(known, dtype=np.int64), max_draft)


def plain_proposal(known: list[int], max_draft: int) -> list[int]:
    """What followed the latest earlier occurrence of the last three tokens, or else two."""
    for n in (3, 2):
        for start in range(len(known) - 1, n - 1, -1):
            if len(known) >= n and known[start - n : start] == known[-n:]:
                grown = list(known)
                for i in range(max_draft):
                    grown.append(grown[start + i])
                return grown[len(known) :]
    return []


@given(tokens, st.integers(0, 6))
def test_proposes_what_followed_the_latest_occurrence(known: list[int], max_draft: int) -> None:
    assert proposal(known, max_draft) == plain_proposal(known, max_draft)


@given(tokens, st.lists(st.integers(0, 30), max_size=5))
def test_a_growing_sequence_gets_what_a_new_one_would(known: list[int], lengths: list[int]) -> None:
    lookup = PromptLookup()
    for length in sorted({min(length, len(known)) for length in lengths}):
        assert proposal(known[:length], 4, lookup) == proposal(known[:length], 4)


def test_a_loop_goes_on_as_a_loop() -> None:
    assert proposal([9, 1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert proposal([7, 7, 7], 3) == [7, 7, 7]


def test_longer_contexts_count_more_than_later_ones() -> None:
    assert proposal([1, 2, 3, 8, 5, 2, 3, 9, 1, 2, 3], 1) == [8]


def test_large_token_ids_are_told_apart() -> None:
    high, low = 2**21 - 1, 2**20 - 1  # the same but for the highest bit
    assert proposal([high, 1, 5, low, 1, 6, high, 1], 1) == [5]
    assert proposal([1, high, 5, 1, low, 6, 1, high], 1) == [5]


def test_nothing_is_proposed_without_a_repetition() -> None:
    assert proposal([], 4) == proposal([1], 4) == proposal([1, 2, 3, 4], 4) == []


def test_a_sequence_that_shrinks_is_an_error() -> None:
    lookup = PromptLookup()
    proposal([1, 2, 3], 1, lookup)
    with pytest.raises(ValueError, match="a sequence only grows; it had 3 tokens, now 2"):
        proposal([1, 2], 1, lookup)


def test_only_n_grams_that_fit_into_a_key_are_allowed() -> None:
    with pytest.raises(ValueError, match="1 <= min <= max <= 3, got 2 and 4"):
        PromptLookup(max_ngram=4)


def run_steps(
    gain: DraftGain,
    num_steps: int,
    seconds: Callable[[int], float],
    num_held: Callable[[int], int],
    num_sequences: int = 4,
) -> list[int]:
    """How many tokens were drafted in each step. seconds: of a step with so many tokens.

    num_held: how many tokens would hold in the draft of a step, however long.
    """
    drafted: list[int] = []
    for step in range(num_steps):
        num_drafts = gain.num_drafts(num_sequences)
        gain.record_step(num_sequences * (1 + num_drafts), seconds(num_sequences * (1 + num_drafts)))
        for _ in range(num_sequences if num_drafts else 0):
            gain.record_draft(num_drafts, min(num_held(step), num_drafts))
        drafted.append(num_drafts)
    return drafted


def always(num_held: int) -> Callable[[int], int]:
    return lambda _step: num_held


def memory_bound(num_tokens: int) -> float:
    """Weights take 10 ms to read whatever is computed; a token adds 0.1 ms."""
    return 10e-3 + 0.1e-3 * num_tokens


def compute_bound(num_tokens: int) -> float:
    return 1e-3 * num_tokens


def test_drafts_that_hold_are_made_long_where_tokens_are_cheap() -> None:
    assert set(run_steps(DraftGain(8), 200, memory_bound, always(8))[20:]) == {8}


def test_no_more_is_drafted_than_holds() -> None:
    drafted = run_steps(DraftGain(8, probe_interval=50), 400, memory_bound, always(3))
    assert drafted.count(3) > 370
    assert 1 <= drafted[100:].count(8) <= 6


def test_where_each_token_costs_as_much_as_the_first_nothing_is_drafted() -> None:
    drafted = run_steps(DraftGain(8, probe_interval=64), 640, compute_bound, always(2))
    assert drafted[20:].count(0) > 600
    assert 8 <= drafted[20:].count(8) <= 10


def test_drafts_that_never_hold_are_only_probed() -> None:
    drafted = run_steps(DraftGain(8, probe_interval=64), 640, memory_bound, always(0))
    assert set(drafted) == {0, 8}
    assert 9 <= drafted.count(8) <= 14


def test_belief_follows_when_the_text_changes() -> None:
    gain = DraftGain(8)
    drafted = run_steps(gain, 2000, memory_bound, lambda step: 6 if 600 <= step < 1200 else 0)
    assert drafted[500:600].count(0) > 90
    assert min(drafted[900:1200]) >= 6
    assert drafted[1700:].count(0) > 280


def test_belief_follows_when_the_load_changes() -> None:
    """The device was idle next to the weights' traffic; then others fill it."""
    gain = DraftGain(8)
    drafted = run_steps(gain, 1000, memory_bound, always(2)) + run_steps(gain, 1000, compute_bound, always(2))
    assert drafted[500:1000].count(2) > 480
    assert drafted[1800:].count(0) > 180


def test_work_per_token_does_not_grow_with_the_sequence() -> None:
    """Only n-grams that end in new tokens are taken up."""
    lookup = PromptLookup()
    proposal(list(range(50)), 1, lookup)
    follows = lookup._follows[2]
    follows.clear()
    proposal(list(range(51)), 1, lookup)
    assert list(follows.values()) == [50]


def test_more_sequences_make_drafts_pay_less() -> None:
    """One sequence leaves the device idle; with many, each drafted token takes the place of a certain one."""

    def seconds(num_tokens: int) -> float:
        return 1e-3 + 0.5e-3 * num_tokens

    alone = run_steps(DraftGain(8), 400, seconds, lambda step: step % 3, num_sequences=1)
    many = run_steps(DraftGain(8), 400, seconds, lambda step: step % 3, num_sequences=32)
    assert alone[100:].count(0) == 0
    assert many[100:].count(0) > 280


def test_nothing_is_drafted_on_one_measure_of_cost_alone() -> None:
    """Before steps of different sizes have been seen, nobody knows what a token costs."""
    gain = DraftGain(4, num_first_drafts=1)
    gain.record_draft(4, 4)
    for _ in range(10):
        gain.record_step(3, 0.01)
        assert gain.num_drafts(3) == 0


def test_a_probe_waits_until_there_is_something_to_draft() -> None:
    gain = DraftGain(4, probe_interval=16)
    assert [gain.num_drafts(1) for _ in range(4)] == [0, 4, 4, 4]
    gain.record_draft(4, 0)
    assert gain.num_drafts(1) == 0


@pytest.mark.parametrize(("num_drafted", "num_accepted"), [(2, 3), (9, 0), (2, -1)])
def test_drafts_that_cannot_have_been_are_errors(num_drafted: int, num_accepted: int) -> None:
    with pytest.raises(ValueError, match="cannot have held"):
        DraftGain(8).record_draft(num_drafted, num_accepted)
