"""FrameSampling picks the frames that the models' own processors pick."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from epd import video
from epd.errors import MediaLimitError, RequestError
from epd.video.containers.info import VideoInfo
from tests.video.conftest import Clip

RATES = [Fraction(24), Fraction(25), Fraction(30), Fraction(30000, 1001), Fraction(60), Fraction(25, 2)]


def info_of(num_frames: int, fps: Fraction) -> VideoInfo:
    return VideoInfo(
        codec="h264",
        width=128,
        height=96,
        rotation_deg=0,
        time_base=Fraction(1, 90_000),
        start_pts=0,
        duration_s_from_stream=float(num_frames / fps),
        duration_s_from_container=None,
        average_fps_from_header=fps,
        nominal_fps_guessed=None,
        num_frames_from_header=num_frames,
        keyframe_ticks_from_index=None,
        container_format="mov",
        pixel_format="yuv420p",
    )


def indices(times_s: np.ndarray, fps: Fraction) -> list[int]:
    return [int(time_s * float(fps)) for time_s in times_s]


@pytest.fixture(scope="module")
def qwen2() -> Qwen2VLVideoProcessor:
    return Qwen2VLVideoProcessor()


@pytest.fixture(scope="module")
def qwen3() -> Qwen3VLVideoProcessor:
    return Qwen3VLVideoProcessor()


@given(st.integers(4, 40_000), st.sampled_from(RATES), st.sampled_from([0.25, 0.5, 1, 2, 3.7]))
@settings(max_examples=300, deadline=None)
def test_fps_as_qwen2_vl(qwen2: Qwen2VLVideoProcessor, total: int, rate: Fraction, fps: float) -> None:
    metadata = VideoMetadata(total_num_frames=total, fps=float(rate), duration=float(total / rate))
    expected = qwen2.sample_frames(metadata, fps=fps).tolist()
    times_s = video.sample_times(info_of(total, rate), fps=fps, min_frames=4, max_frames=768, multiple_of=2)
    assert indices(times_s, rate) == expected


@given(st.integers(8, 40_000), st.sampled_from(RATES), st.integers(2, 300))
@settings(max_examples=300, deadline=None)
def test_num_frames_as_qwen2_vl(
    qwen2: Qwen2VLVideoProcessor, total: int, rate: Fraction, num_frames: int
) -> None:
    assume(round(num_frames / 2) * 2 <= total)
    metadata = VideoMetadata(total_num_frames=total, fps=float(rate), duration=float(total / rate))
    expected = qwen2.sample_frames(metadata, num_frames=num_frames).tolist()
    times_s = video.sample_times(info_of(total, rate), num_frames=num_frames, multiple_of=2)
    assert indices(times_s, rate) == expected


@given(st.integers(1, 40_000), st.sampled_from(RATES), st.sampled_from([0.25, 0.5, 1, 2, 3.7]))
@settings(max_examples=300, deadline=None)
def test_fps_as_qwen3_vl(qwen3: Qwen3VLVideoProcessor, total: int, rate: Fraction, fps: float) -> None:
    metadata = VideoMetadata(total_num_frames=total, fps=float(rate), duration=float(total / rate))
    expected = qwen3.sample_frames(metadata, fps=fps).tolist()
    info = info_of(total, rate)
    times_s = video.sample_times(info, fps=fps, min_frames=4, max_frames=768, spacing="endpoints")
    assert indices(times_s, rate) == expected


def test_the_frames_of_a_real_file_are_those_of_the_processor(
    clip: Clip, qwen2: Qwen2VLVideoProcessor
) -> None:
    for name in ("h264_b.mp4", "ntsc.mp4", "h264.mkv", "h264.ts", "late_start.mkv", "h264_fragmented.mp4"):
        path = clip(name)
        info = video.probe(path)
        metadata = VideoMetadata(total_num_frames=60, fps=info.fps, duration=60 / info.fps)
        expected = qwen2.sample_frames(metadata, fps=7).tolist()
        every = np.unique(video.decode(path, np.arange(-0.1, info.duration_s, 0.004)).pts_s)
        times_s = video.sample_times(info, fps=7, min_frames=4, multiple_of=2)
        assert info.num_frames == len(every) == 60, name
        assert np.array_equal(video.decode(path, times_s).pts_s, every[expected]), name


def test_a_span_is_half_open_and_sampled_like_a_video_of_its_own() -> None:
    info = info_of(300, Fraction(30))
    times_s = video.sample_times(info, fps=1, start_s=2.0, end_s=5.0)
    assert indices(times_s, Fraction(30)) == [60, 90, 120]
    assert list(video.sample_times(info, times_s=[1.0, 2.0, 4.999, 5.0], start_s=2.0, end_s=5.0)) == [
        2.0,
        4.999,
    ]


def test_bounds_on_the_number_of_frames() -> None:
    info = info_of(300, Fraction(30))
    assert len(video.sample_times(info, fps=30, max_frames=64)) == 64
    assert len(video.sample_times(info, fps=0.1, min_frames=4)) == 4
    assert len(video.sample_times(info, num_frames=1000)) == 300


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fps": 1, "num_frames": 4},
        {"fps": 0},
        {"fps": float("nan")},
        {"num_frames": 0},
        {"fps": 1, "multiple_of": 0},
        {"fps": 1, "start_s": 5.0, "end_s": 5.0},
        {"fps": 1, "start_s": -1.0},
        {"times_s": [[1.0]]},
        {"times_s": [float("inf")]},
    ],
)
def test_options_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        video.sample_times(info_of(300, Fraction(30)), **options)


def test_endless_claims_are_refused() -> None:
    endless = replace(info_of(300, Fraction(30)), duration_s_from_stream=1e12, num_frames_from_header=None)
    with pytest.raises(MediaLimitError):
        video.sample_times(endless, fps=1)
