"""Every way of decoding equals the plain sequential loop, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from epd import video
from epd.video.containers.info import VideoInfo
from tests.video.conftest import Clip
from tests.video.plain_decoder import reference_decode
from tests.video.recipes import RECIPES
from tests.video.util import assert_same_frames

SIZE = (40, 56)


def wanted_times(info: VideoInfo) -> dict[str, list[float]]:
    """The patterns that the matrix asks for, seconds."""
    end_s = info.duration_s
    rng = np.random.default_rng(7)
    return {
        "dense": list(np.arange(0, end_s, 1 / 30) + 0.005),
        "sparse": list(np.arange(0.21, end_s, 0.7)),
        "single": [end_s * 0.63],
        "repeated": [0.5, 0.5, 0.5, 1.1, 1.1, end_s / 2],
        "unsorted": list(rng.uniform(0, end_s, 12)),
        "out_of_range": [-5.0, end_s + 3.0, 1e6, 0.4, -0.001],
    }


@pytest.mark.parametrize("name", RECIPES)
def test_decode_and_stream_equal_the_reference(name: str, clip: Clip) -> None:
    path = clip(name)
    for times in wanted_times(video.probe(path)).values():
        truth = reference_decode(path, times, size=SIZE)
        for workers in (1, 2):
            assert_same_frames(video.decode(path, times, size=SIZE, workers=workers), truth)
        with video.stream(path, times, size=SIZE, group_size=5) as groups:
            for group in groups:
                part = slice(group.start, group.stop)
                expected = video.Frames(truth.data[part], truth.pts_s[part])
                assert_same_frames(group.frames, expected)


@pytest.mark.parametrize(
    "name", ["h264_b.mp4", "rotated_90.mp4", "odd_size.mp4", "hevc_10bit.mp4", "mjpeg.avi"]
)
def test_full_size_frames_equal_the_reference(name: str, clip: Clip) -> None:
    path = clip(name)
    info = video.probe(path)
    times = [0.1, 0.9, 1.7]
    truth = reference_decode(path, times)
    assert truth.data.shape == (3, info.height, info.width, 3)
    assert_same_frames(video.decode(path, times), truth)


@pytest.mark.parametrize("name", ["h264_b.mp4", "h264_open_gop.ts", "vp9.webm"])
def test_bytes_and_file_objects_equal_the_path(name: str, clip: Clip) -> None:
    path = clip(name)
    times = [0.1, 0.5, 1.3, 1.9]
    truth = reference_decode(path, times, size=SIZE)
    assert_same_frames(video.decode(path.read_bytes(), times, size=SIZE, workers=2), truth)
    with path.open("rb") as file:
        assert_same_frames(video.decode(file, times, size=SIZE, workers=2), truth)


def test_rotation_turns_the_frame_upright(clip: Clip) -> None:
    plain = video.decode(clip("h264_b.mp4"), [0.5]).data[0]
    turns = {"rotated_90.mp4": 1, "rotated_180.mov": 2, "rotated_270.mkv": 3}
    for name, quarter_turns in turns.items():
        assert np.array_equal(video.decode(clip(name), [0.5]).data[0], np.rot90(plain, quarter_turns)), name
        assert video.probe(clip(name)).rotation_deg == (360 - 90 * quarter_turns) % 360


def test_full_range_is_not_stretched(clip: Clip) -> None:
    """Read as video range, the picture would be 6 levels off on average; coding costs 2."""
    path, recipe = clip("full_range.mp4"), RECIPES["full_range.mp4"]
    assert video.probe(path).pixel_format == "yuvj420p"
    frames = video.decode(path, [0.01, 0.51])
    for image, number in zip(frames.data, (0, 15), strict=True):
        assert np.abs(image.astype(int) - recipe.picture(number)).mean() < 4.0


def test_the_frame_at_t_is_the_last_one_with_pts_up_to_t(clip: Clip) -> None:
    path = clip("vfr.mp4")
    starts = video.decode(path, np.arange(0, 2, 0.001)).pts_s
    starts = np.unique(starts)
    frames = video.decode(path, [*starts, *(starts[1:] - 0.001)])
    assert np.array_equal(frames.pts_s, [*starts, *starts[:-1]])


def test_avi_shows_b_frames_in_their_true_order(clip: Clip) -> None:
    """The same bitstream in MP4 is the witness: in AVI the reference needs the same help as the decoder."""
    numbers = np.arange(60)
    in_avi = video.decode(clip("h264.avi"), (numbers + 0.5) / 30)
    in_mov = video.decode(clip("h264.mov"), (numbers + 0.5) / 30)
    assert np.array_equal(in_avi.data, in_mov.data)
