"""How a video is cut into runs for several readers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd.serve_app.orchestration.item_frames import Run, plan_runs


@given(st.integers(0, 400), st.integers(0, 9))
def test_runs_cover_all_groups_once_and_in_order(num_groups: int, num_readers: int) -> None:
    runs = plan_runs(num_groups, num_readers)
    assert [group for run in runs for group in range(run.start, run.stop)] == list(range(num_groups))
    assert all(num in run for run in runs for num in range(run.start, run.stop))
    assert {run.reader for run in runs} <= set(range(max(1, num_readers)))
    assert all(run.stop - run.start <= 16 for run in runs) or len(runs) == 1


def test_long_videos_use_every_reader_and_short_ones_one() -> None:
    assert plan_runs(16, 2) == (Run(0, 4, 0), Run(4, 8, 1), Run(8, 12, 0), Run(12, 16, 1))
    assert plan_runs(7, 2) == (Run(0, 7, 0),)
    assert plan_runs(100, 1) == (Run(0, 100, 0),)
    assert plan_runs(9, 3) == (Run(0, 4, 0), Run(4, 8, 1), Run(8, 9, 2))
    assert [run.stop - run.start for run in plan_runs(200, 2)[:2]] == [16, 16]
