"""Room in a staging segment: nothing overlaps, nothing is lost, one receiver leaves room for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.transfer.staging import ALIGNMENT, StagingSpace

STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5 * ALIGNMENT), st.integers(0, 99)))


@given(STEPS)
def test_pieces_never_overlap_and_all_room_comes_back(steps: list[tuple[str, int, int]]) -> None:
    space = StagingSpace(10 * ALIGNMENT)
    taken: list[int] = []
    for receiver, num_bytes, number in steps:
        offset = space.take(receiver, num_bytes)
        if offset is not None:
            assert offset % ALIGNMENT == 0
            taken.append(offset)
        elif taken:
            space.free(taken.pop(number % len(taken)))
        space.check_integrity()
        assert len(set(taken)) == len(taken)
    for offset in taken:
        space.free(offset)
    assert space.num_taken == 0
    assert space.take("a", 5 * ALIGNMENT) == 0


def test_a_receiver_that_hangs_leaves_half_of_the_room() -> None:
    space = StagingSpace(8 * ALIGNMENT)
    while space.take("hangs", ALIGNMENT) is not None:
        pass
    assert space.num_taken == space.max_bytes
    assert space.take("other", 4 * ALIGNMENT) is not None


def test_what_does_not_pass_is_refused() -> None:
    space = StagingSpace(8 * ALIGNMENT)
    with pytest.raises(ValueError, match="make smaller parts"):
        space.take("a", 4 * ALIGNMENT + 1)
    with pytest.raises(ValueError, match="nothing is taken"):
        space.free(0)
