"""Which waiting groups an encoder takes together, told as stories and drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from epd.encode.encoder_cache import GroupKey
from epd.encode.sharding import pick_batch


@dataclass(frozen=True)
class Waiting:
    key: GroupKey
    shape: tuple[int, ...]
    num_patches: int


def waiting(value: int, num_patches: int = 10, shape: int = 1) -> Waiting:
    return Waiting(GroupKey(str(value), (), (0, 1), (1, 1), "m"), (shape,), num_patches)


def test_groups_of_one_shape_share_a_call_of_the_tower() -> None:
    queue = [waiting(0, shape=1), waiting(1, shape=2), waiting(2, shape=1)]
    assert pick_batch(queue, 100) == [0, 2]


def test_the_oldest_group_goes_alone_where_it_fills_the_budget() -> None:
    assert pick_batch([waiting(0, 500), waiting(1)], 100) == [0]


def test_a_batch_ends_with_the_first_group_that_does_not_fit() -> None:
    """A younger one that would fit does not overtake it."""
    assert pick_batch([waiting(0, 40), waiting(1, 40), waiting(2, 40), waiting(3, 20)], 100) == [0, 1]


def test_what_two_requests_wait_for_is_encoded_once() -> None:
    assert pick_batch([waiting(0), waiting(0), waiting(1)], 100) == [0, 2]


WAITING = st.builds(waiting, st.integers(0, 5), st.integers(1, 50), st.integers(1, 2))


@given(waiting=st.lists(WAITING, min_size=1, max_size=12), max_patches=st.integers(1, 120))
def test_a_batch_has_one_shape_distinct_keys_and_the_oldest_group(
    waiting: list[Waiting], max_patches: int
) -> None:
    picked = [waiting[index] for index in pick_batch(waiting, max_patches)]
    assert picked[0] is waiting[0]
    assert {group.shape for group in picked} == {waiting[0].shape}
    assert len({group.key for group in picked}) == len(picked)
    assert len(picked) == 1 or sum(group.num_patches for group in picked) <= max_patches


def test_nothing_waiting_is_no_batch() -> None:
    assert pick_batch([], 100) == []
