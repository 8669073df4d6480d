"""More frames than a request may have are refused before they are listed, whatever a container claims."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.encoders import FrameSampling, VideoFacts
from epd.errors import RequestBudgetError
from tests.encoders.families import Family

HUGE = VideoFacts(50_000_000, 600.0, 64, 64)
MAX_FRAMES = 1024


@pytest.mark.parametrize(
    "sampling",
    [
        FrameSampling(num_frames=3_000_000, max_frames=MAX_FRAMES),
        FrameSampling(num_frames=2**62, max_frames=MAX_FRAMES),
        FrameSampling(num_frames=MAX_FRAMES + 2, max_frames=MAX_FRAMES),
    ],
    ids=str,
)
def test_a_number_of_frames_above_the_ceiling_costs_nothing(family: Family, sampling: FrameSampling) -> None:
    family.adapter.plan_video(HUGE, FrameSampling(num_frames=2))  # imports what it needs
    tracemalloc.start()
    start_s = time.thread_time()
    with pytest.raises(RequestBudgetError, match=r"allowed 1,024 .*max_frames.*lower num_frames or fps"):
        family.adapter.plan_video(HUGE, sampling)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert time.thread_time() - start_s < 1.0


@pytest.mark.parametrize("fps", [600.0, 1e9, 1e308])
def test_any_rate_gives_no_more_than_the_ceiling(family: Family, fps: float) -> None:
    """Some processors have a ceiling of their own, below which a rate falls silently; the others refuse."""
    try:
        plan = family.adapter.plan_video(HUGE, FrameSampling(fps=fps, max_frames=MAX_FRAMES))
    except RequestBudgetError:
        return
    assert plan.num_frames <= MAX_FRAMES


@given(
    num_frames=st.integers(1, 3000),
    fps=st.floats(0.5, 120),
    wanted=st.one_of(
        st.builds(FrameSampling),
        st.builds(FrameSampling, fps=st.floats(0.01, 1e9)),
        st.builds(FrameSampling, num_frames=st.integers(1, 4000)),
    ),
)
@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_within_the_ceiling_is_planned_as_without_one(
    family: Family, num_frames: int, fps: float, wanted: FrameSampling
) -> None:
    """A processor rounds down to whole units, so a unit more may be counted. SmolVLM's lists some twice."""
    video = VideoFacts(num_frames, fps, 64, 64)
    plan = family.adapter.plan_video(video, wanted)
    ceiling = 4000 if family.name == "smolvlm" else plan.num_frames + plan.frames_per_unit
    assert family.adapter.plan_video(video, replace(wanted, max_frames=ceiling)) == plan
