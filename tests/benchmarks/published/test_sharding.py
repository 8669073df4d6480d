"""The shard plan: every group once, runs in order, balanced by patches."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.sharding import GroupRun, imbalance, least_loaded, plan_shards

PATCHES = st.lists(st.integers(1, 400), min_size=1, max_size=40)
LOADS = st.lists(st.integers(0, 2000), min_size=1, max_size=8)


@given(PATCHES, LOADS, st.none() | st.integers(1, 1000))
def test_every_group_goes_to_exactly_one_encoder_in_order(
    patches: list[int], loads: list[int], max_run: int | None
) -> None:
    shards = plan_shards(patches, loads, max_run_patches=max_run)
    assert sorted(index for shard in shards for index in shard.groups) == list(range(len(patches)))
    assert len({shard.encoder for shard in shards}) == len(shards)
    for shard in shards:
        assert shard.groups == tuple(sorted(shard.groups))
        assert shard.num_patches == sum(patches[index] for index in shard.groups)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.integers(1, 4))
def test_one_run_each_has_the_smallest_possible_largest_shard(patches: list[int], encoders: int) -> None:
    shards = plan_shards(patches, [0] * encoders)
    assert all(len(shard.runs) == 1 for shard in shards)
    assert max(shard.num_patches for shard in shards) == _best_by_trying_all_cuts(patches, encoders)


def _best_by_trying_all_cuts(patches: list[int], encoders: int) -> int:
    inner = range(1, len(patches))
    cuts = [cut for number in range(min(encoders, len(patches))) for cut in combinations(inner, number)]
    return min(
        max(sum(patches[a:b]) for a, b in zip((0, *cut), (*cut, len(patches)), strict=True)) for cut in cuts
    )


@given(st.lists(st.integers(50, 100), min_size=160, max_size=300), st.sampled_from([2, 3, 5, 8]))
def test_many_groups_are_balanced_within_a_tenth(patches: list[int], encoders: int) -> None:
    assert imbalance(plan_shards(patches, [0] * encoders), encoders) <= 1.1
    assert imbalance(plan_shards(patches, [0] * encoders, max_run_patches=200), encoders) <= 1.1


@given(PATCHES, LOADS, st.integers(1, 500))
def test_dealing_never_lifts_an_encoder_above_the_idlest_by_more_than_a_run(
    patches: list[int], loads: list[int], max_run: int
) -> None:
    shards = plan_shards(patches, loads, max_run_patches=max_run)
    final = list(loads)
    for shard in shards:
        final[shard.encoder] += shard.num_patches
    largest_run = max(run.num_patches for shard in shards for run in shard.runs)
    assert largest_run <= max(max_run, *patches)
    assert all(final[shard.encoder] <= min(final) + largest_run for shard in shards)


def test_a_busy_encoder_is_left_out() -> None:
    shards = plan_shards([10, 10, 10, 10], [1000, 0, 0])
    assert [(shard.encoder, shard.groups) for shard in shards] == [(1, (0, 1)), (2, (2, 3))]


def test_a_partly_busy_encoder_gets_less() -> None:
    shards = plan_shards([10] * 6, [20, 0])
    assert [(shard.encoder, shard.groups) for shard in shards] == [(0, (4, 5)), (1, (0, 1, 2, 3))]


def test_dealt_runs_of_a_stream_start_on_every_encoder() -> None:
    shards = plan_shards([4] * 6, [0, 0, 0], max_run_patches=4)
    assert [shard.groups for shard in shards] == [(0, 3), (1, 4), (2, 5)]
    assert shards[0].runs == (GroupRun(0, 1, 4), GroupRun(3, 4, 4))


def test_least_loaded_takes_the_first_of_equals() -> None:
    assert least_loaded([3, 1, 1]) == 1


def test_no_groups_need_no_shards() -> None:
    assert plan_shards([], [0, 0]) == ()
    assert plan_shards([], [0, 0], max_run_patches=5) == ()


@pytest.mark.parametrize(
    ("patches", "loads", "max_run", "message"),
    [
        ([1], [], None, "0 encoders"),
        ([0], [0], None, "at least 1 patch"),
        ([1], [-1], None, "cannot be negative"),
        ([1], [0], 0, "max_run_patches must be at least 1, got 0"),
    ],
)
def test_nonsense_is_refused(patches: list[int], loads: list[int], max_run: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_shards(patches, loads, max_run_patches=max_run)
