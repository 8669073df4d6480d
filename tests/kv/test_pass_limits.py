"""Limits of a pass that are not set are those of the device."""

from __future__ import annotations

import pytest

from epd.kv.pass_limits import PassLimits, SchedulerConfig

GB = 10**9


@pytest.mark.parametrize(
    ("gpu_gb", "num_tokens", "num_seqs"), [(0, 2048, 64), (24, 2048, 256), (48, 2048, 256), (80, 8192, 1024)]
)
def test_what_is_not_set_is_chosen_by_memory(gpu_gb: int, num_tokens: int, num_seqs: int) -> None:
    assert PassLimits().on(gpu_gb * GB) == SchedulerConfig(num_tokens, num_seqs, num_tokens)
    assert PassLimits(max_num_seqs=3).on(gpu_gb * GB) == SchedulerConfig(num_tokens, 3, num_tokens)
    assert PassLimits(100, 5, 7).on(gpu_gb * GB) == SchedulerConfig(100, 5, 7)


def test_on_a_cpu_the_limits_are_those_of_a_scheduler() -> None:
    assert PassLimits().on(0) == SchedulerConfig()


def test_answers_with_room_of_their_own_are_as_many_as_on_a_cpu() -> None:
    assert PassLimits().on(80 * GB, keeps_states=True) == SchedulerConfig(8192, 64, 8192)
    assert PassLimits(max_num_seqs=200).on(80 * GB, keeps_states=True).max_num_seqs == 200
