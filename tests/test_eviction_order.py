"""What a cache drops first: what was used longest ago, and before that what a greedy client has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.eviction_order import _NUM_TURNS, EvictionOrder


def filled(*keys: str) -> EvictionOrder[str]:
    """Keys of one block, each of the client that its first letter names."""
    order: EvictionOrder[str] = EvictionOrder()
    for key in keys:
        order.add(key, key[0])
    return order


def dropped(order: EvictionOrder[str], count: int) -> list[str]:
    gone = []
    for _ in range(count):
        gone.append(order.first())
        order.drop(gone[-1])
    return gone


@pytest.mark.parametrize(
    ("keys", "gone"),
    [
        pytest.param(["a1", "a2", "a3"], ["a1", "a2", "a3"], id="one client"),
        pytest.param(["a1", "b1", "a2", "b2"], ["a1", "b1", "a2", "b2"], id="two alike"),
        pytest.param(["a1", "b1", "b2", "b3"], ["b1", "b2", "a1", "b3"], id="one has more than half"),
        pytest.param(["a1", "b1", "c1", "d1", "a2"], ["a1", "b1", "c1", "d1", "a2"], id="nobody has"),
        pytest.param(["a1", "b1", "b2", "c1"], ["a1", "b1", "b2", "c1"], id="half is not more"),
    ],
)
def test_the_order(keys: Sequence[str], gone: Sequence[str]) -> None:
    assert dropped(filled(*keys), len(keys)) == gone


def test_sizes_count_and_not_keys() -> None:
    order: EvictionOrder[str] = EvictionOrder()
    for key, num_blocks in (("a1", 2), ("a2", 2), ("b1", 5)):
        order.add(key, key[0], num_blocks)
    assert order.num_blocks == 9
    assert dropped(order, 3) == ["b1", "a1", "a2"]


def test_what_is_used_again_goes_last() -> None:
    order = filled("a1", "a2", "a3")
    order.touch("a1")
    assert dropped(order, 3) == ["a2", "a3", "a1"]


def test_what_nobody_uses_does_not_stay_for_ever() -> None:
    """A greedy client in a cache of 8 blocks: the other's block outlives some turns of it, not all."""
    order = filled("a0", *(f"b{number}" for number in range(7)))
    for number in range(7, 7 + 8 * _NUM_TURNS):
        assert dropped(order, 1)[0][0] == "b"
        order.add(f"b{number}", "b")
    assert "a0" in order
    for number in range(100, 102):
        order.drop(order.first())
        order.add(f"b{number}", "b")
    assert "a0" not in order


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=60))
def test_the_books_are_right(steps: Sequence[tuple[str, int, bool]]) -> None:
    order: EvictionOrder[str] = EvictionOrder()
    known: dict[str, tuple[str, int]] = {}
    for client, size, is_dropped in steps:
        key = f"{client}{size}"
        if is_dropped and known:
            first = order.first()
            own = sum(num for owner, num in known.values() if owner == known[first][0])
            assert first == next(iter(known)) or 2 * own > order.num_blocks
            order.drop(first)
            del known[first]
        elif key in known:
            order.touch(key)
            known[key] = known.pop(key)
        else:
            order.add(key, client, size + 1)
            known[key] = client, size + 1
        assert list(order) == list(known)
        assert order.num_blocks == sum(num for _, num in known.values())
        assert all(key in order for key in known)
