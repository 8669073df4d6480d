"""The pace of work, as measured of late."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from epd.control.recent import Pace, ReadPace


def test_nothing_is_known_before_the_first_work() -> None:
    assert Pace().seconds(10, 0.0) is None


def test_work_takes_what_such_work_took() -> None:
    pace = Pace()
    pace.add(100, 5.0, 7.0)
    assert pace.seconds(50, 7.0) == pytest.approx(1.0)
    assert pace.seconds(50, 1e9) == pytest.approx(1.0)


def test_work_at_once_counts_together() -> None:
    """Four readers of a disk, each a quarter of its speed."""
    pace = Pace()
    for number in range(4):
        pace.add(1, 0.0, 1.0 + number / 1000)
    assert pace.seconds(4, 1.0) == pytest.approx(1.0, rel=0.01)


def test_late_work_counts_for_more() -> None:
    pace = Pace(memory_s=10.0)
    pace.add(1, 0.0, 1.0)
    pace.add(1, 100.0, 105.0)
    assert pace.seconds(1, 105.0) == pytest.approx(5.0, rel=0.01)


def test_a_pace_is_forgotten() -> None:
    """So that what was slow is tried again."""
    pace = Pace(forget_s=60.0)
    pace.add(1, 0.0, 100.0)
    assert pace.seconds(1, 159.0) == pytest.approx(100.0)
    assert pace.seconds(1, 161.0) is None
    pace.add(1, 200.0, 201.0)
    assert pace.seconds(1, 201.0) == pytest.approx(1.0)


def read(
    pace: ReadPace, sizes: Sequence[int], latency_s: float, bytes_per_s: float, noise: float = 0
) -> float:
    """Reads one after another, as `noise` has it. Returns the time afterwards."""
    draw, now_s = random.Random(47), 0.0
    for size in sizes:
        taken_s = (latency_s + size / bytes_per_s) * draw.uniform(1 - noise, 1 + noise)
        pace.add(size, now_s, now_s + taken_s)
        now_s += taken_s
    return now_s


@pytest.mark.parametrize("latency_s", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("bytes_per_s", [2e6, 2e7, 1e9])
def test_reads_of_two_sizes_tell_how_long_any_takes(latency_s: float, bytes_per_s: float) -> None:
    """A piece of keys and values, its prompt's last one, and then the embeddings of a unit: 4 KB."""
    pace = ReadPace()
    now_s = read(pace, [1_570_000, 172_000] * 2, latency_s, bytes_per_s, noise=0.02)
    small_s, large_s = (latency_s + size / bytes_per_s for size in (4096, 1_570_000))
    assert pace.seconds(1_570_000, now_s) == pytest.approx(large_s, rel=0.05)
    assert pace.seconds(4096, now_s) == pytest.approx(small_s, rel=0.2, abs=2048 / bytes_per_s * 10)


def test_reads_of_one_size_are_taken_to_cost_64_kib_more() -> None:
    pace = ReadPace()
    now_s = read(pace, [1 << 16] * 3, 0.0, 1e6)
    assert pace.seconds(1 << 16, now_s) == pytest.approx((1 << 16) / 1e6)
    assert pace.seconds(0, now_s) == pytest.approx((1 << 15) / 1e6)


def test_no_read_takes_less_than_nothing() -> None:
    """However reads differ: of large ones that were quick, and small ones that waited, and the reverse."""
    for sizes in ((1 << 20, 1 << 10), (1 << 10, 1 << 20)):
        pace = ReadPace()
        pace.add(sizes[0], 0.0, 1e-3)
        pace.add(sizes[1], 1e-3, 1.0)
        assert all((pace.seconds(1 << size, 1.0) or 0.0) >= 0 for size in range(32))
        assert (pace.seconds(sizes[1], 1.0) or 0.0) > 0.5
