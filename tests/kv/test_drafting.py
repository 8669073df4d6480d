"""Sources of drafts: repetitions in a sequence, and successors that requests share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.kv.draft_sources import PromptLookup, Recycling, SuccessorTable
from epd.types import Int64Array

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


def test_work_per_token_does_not_grow_with_the_sequence() -> None:
    """Only n-grams that end in new tokens are taken up."""
    lookup = PromptLookup()
    proposal(list(range(50)), 1, lookup)
    follows = lookup._follows[2]
    follows.clear()
    proposal(list(range(51)), 1, lookup)
    assert list(follows.values()) == [50]


def ids(*token_ids: int) -> Int64Array:
    return np.array(token_ids, dtype=np.int64)


def chain(table: SuccessorTable, known: Int64Array, max_draft: int) -> list[int]:
    return Recycling(table).propose(known, max_draft)


def test_recycling_follows_what_came_last() -> None:
    table = SuccessorTable(10)
    Recycling(table).learn(ids(9, 1), [2, 3], [2, 3, 4])
    assert chain(table, ids(9, 1), 5) == [2, 3, 4]
    Recycling(table).learn(ids(9, 1), [], [7])
    assert chain(table, ids(9, 1), 5) == [7]


def test_recycling_learns_what_came_in_passes_without_it() -> None:
    table, reader = SuccessorTable(10), SuccessorTable(10)
    source = Recycling(table)
    assert source.propose(ids(9, 1), 2) == [], "nothing is learnt from the prompt"
    assert source.propose(ids(9, 1, 2, 3, 1), 2) == [2, 3]
    late = Recycling(reader)
    late.propose(ids(4), 1)
    late.learn(ids(4, 5), [], [6])
    assert chain(reader, ids(4), 2) == [5, 6]


def test_recycling_learns_from_rejected_drafts_too() -> None:
    """What the model sampled after the wrong draft 5 is known when 5 comes up."""
    table = SuccessorTable(10)
    Recycling(table).learn(ids(0, 1), [5, 6], [2, 8, 9])
    assert chain(table, ids(0, 5), 1) == [8]
    assert chain(table, ids(5, 6), 1) == [9]


def test_the_token_before_tells_successors_apart() -> None:
    table = SuccessorTable(10)
    Recycling(table).learn(ids(1, 3), [], [4])
    Recycling(table).learn(ids(2, 3), [], [5])
    assert chain(table, ids(1, 3), 1) == [4]
    assert chain(table, ids(2, 3), 1) == [5]
    assert chain(table, ids(8, 3), 1) == [5], "after another token, the latest"


def test_requests_share_a_table() -> None:
    table = SuccessorTable(10)
    first, second = Recycling(table), Recycling(table)
    first.learn(ids(1, 2), [], [3])
    assert second.propose(ids(1, 2), 1) == [3]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), min_size=1, max_size=3),
            st.lists(st.integers(0, 12), max_size=3),
            st.lists(st.integers(0, 12), min_size=4, max_size=4),
        ),
        max_size=8,
    ),
    st.integers(0, 6),
)
def test_a_table_keeps_its_size_and_drafts_no_unknown_token(
    passes: list[tuple[list[int], list[int], list[int]]], max_draft: int
) -> None:
    """Ids from 8 on have no row, as an id that the model has no logits for."""
    table = SuccessorTable(8)
    size, seen = table._rows.nbytes, set[int]()
    for known, drafts, sampled in passes:
        Recycling(table).learn(ids(*known), drafts, sampled[: len(drafts) + 1])
        seen |= set(sampled)
        proposed = chain(table, ids(*known), max_draft)
        assert len(proposed) <= max_draft
        assert set(proposed) <= seen
    assert table._rows.nbytes == size == 8 * 8 * 4
