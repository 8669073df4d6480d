"""The cut of a video into groups: the picture of the module's docstring, and what any cut must hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.encode.sharding import cut_units, units_of


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_unit", "expected"),
    [(256, 64, 4), (256, 100, 2), (256, 256, 1), (255, 256, 1), (1, 4096, 1), (0, 5, 1)],
)
def test_as_many_units_as_fit_into_the_tokens_and_one_at_least(
    num_tokens: int, tokens_per_unit: int, expected: int
) -> None:
    assert units_of(num_tokens, tokens_per_unit) == expected


@pytest.mark.parametrize(
    ("num_units", "lattice_index", "expected"),
    [
        (20, 0, [(0, 2), (2, 8), (8, 16), (16, 20)]),
        (15, 5, [(0, 1), (1, 3), (3, 11), (11, 15)]),  # the clip from unit 5
        (16, 0, [(0, 2), (2, 8), (8, 16)]),  # no empty group where the last ends on the lattice
        (8, 8, [(0, 2), (2, 8)]),
        (2, 0, [(0, 2)]),
        (1, 7, [(0, 1)]),
        (3, 7, [(0, 1), (1, 3)]),  # the small first group ends with the large cell
    ],
)
def test_groups_end_on_the_lattice_of_the_video(
    num_units: int, lattice_index: int, expected: list[tuple[int, int]]
) -> None:
    """Groups of 8 units, the first of 2, as in the picture."""
    assert cut_units(num_units, 8, 2, lattice_index) == expected


def test_a_video_begins_at_the_start_of_its_lattice_by_default() -> None:
    assert cut_units(5, 4, 2) == [(0, 2), (2, 4), (4, 5)]


def test_a_first_group_may_not_be_larger_than_the_others() -> None:
    assert cut_units(10, 4, 100) == [(0, 4), (4, 8), (8, 10)]


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 20), st.integers(0, 500))
def test_a_clip_has_the_groups_of_the_whole_video_but_for_its_first(
    num_units: int, group_units: int, first_units: int, lattice_index: int
) -> None:
    found = cut_units(num_units, group_units, first_units, lattice_index)
    assert [unit for start, stop in found for unit in range(start, stop)] == list(range(num_units))
    assert found[0][1] <= min(first_units, group_units)
    assert all(stop - start <= group_units for start, stop in found)
    inner_ends = {stop + lattice_index for _, stop in found[1:-1]}
    assert all(end % group_units == 0 for end in inner_ends)
