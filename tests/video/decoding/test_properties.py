"""Times, GOP lengths and rates drawn at random: what comes out is always what the sequential loop shows."""

from __future__ import annotations

import io
from functools import cache

import av
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from epd import video
from epd.types import Frames
from tests.video.conftest import Clip
from tests.video.plain_decoder import reference_decode
from tests.video.recipes import Recipe
from tests.video.util import assert_same_frames


@cache
def whole(data: bytes) -> tuple[Frames, float]:
    """Every frame of a video by the sequential loop."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        start = stream.start_time or 0
        pts = [float((frame.pts - start) * stream.time_base) for frame in container.decode(stream)]
    return reference_decode(data, pts), pts[-1]


def recipe(gop: int, num_b: int, is_open: bool, gap: int) -> Recipe:
    params = f"keyint={gop}:min-keyint={gop}:scenecut=0:bframes={num_b}:open-gop={int(is_open)}:b-adapt=0"
    name = f"h264-{gop}-{num_b}-{is_open}-{gap}.mp4"
    return Recipe(
        name,
        options={"preset": "veryfast", "x264-params": params},
        num_frames=48,
        gaps=(gap,),
        width=64,
        height=48,
    )


@given(
    gop=st.sampled_from([1, 3, 12, 100]),
    num_b=st.sampled_from([0, 2, 3]),
    is_open=st.booleans(),
    gap=st.sampled_from([10, 24, 25]),
    times=st.lists(st.floats(-0.5, 3.0), min_size=1, max_size=20),
    workers=st.sampled_from([1, 2]),
    group_size=st.integers(1, 6),
)
@settings(max_examples=120, deadline=None)
def test_any_times_of_any_video(
    clip: Clip,
    gop: int,
    num_b: int,
    is_open: bool,
    gap: int,
    times: list[float],
    workers: int,
    group_size: int,
) -> None:
    path = clip(recipe(gop, num_b, is_open, gap))
    everything, _ = whole(path.read_bytes())
    places = np.maximum(0, np.searchsorted(everything.pts_s, np.asarray(times) + 1e-6, side="right") - 1)
    truth = Frames(everything.data[places], everything.pts_s[places])
    assert_same_frames(video.decode(path, times, workers=workers), truth)
    with video.stream(path, times, workers=workers, group_size=group_size) as groups:
        parts = list(groups)
    assert [part.start for part in parts] == [0, *np.cumsum([len(part.frames) for part in parts])[:-1]]
    joined = Frames(
        np.concatenate([p.frames.data for p in parts]), np.concatenate([p.frames.pts_s for p in parts])
    )
    assert_same_frames(joined, truth)
