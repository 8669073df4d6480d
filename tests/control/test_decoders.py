"""Where videos are decoded, told as a story of a machine of eight cores with a GPU."""

from __future__ import annotations

import pytest

from epd.control.decoders import DecoderLoad, soonest


def test_the_gpu_takes_the_first_videos_and_the_cpu_those_that_would_wait_longer_there() -> None:
    work, chosen = [0.0, 0.0], []
    for _ in range(8):
        place = soonest([DecoderLoad(8, work[0]), DecoderLoad(24, work[1])], 100.0)
        work[place] += 100.0
        chosen.append(place)
    assert chosen == [1, 1, 0, 1, 1, 1, 0, 1]  # three of four, as it is three times as fast


@pytest.mark.parametrize(
    ("work", "expected"),
    [(1.0, 0), (200.0, 1)],
)
def test_a_short_video_does_not_wait_behind_a_long_one(work: float, expected: int) -> None:
    assert soonest([DecoderLoad(8), DecoderLoad(24, 100.0)], work) == expected


def test_a_machine_without_a_gpu_has_one_place() -> None:
    assert soonest([DecoderLoad(2, 1e12)], 5.0) == 0
