"""Which source frame is on screen when, by the number in its pixels: not by what FFmpeg says of times."""

from __future__ import annotations

import numpy as np
import pytest

from epd import video
from epd.types import Frames
from tests.video.conftest import Clip
from tests.video.mpeg4 import without_control
from tests.video.plain_decoder import reference_decode
from tests.video.recipes import RECIPES, Recipe, number_in, packets_of

# What an edit list hides is no part of the video; a mirrored number cannot be read, nor what the fast AV1
# preset makes of a number at this size.
UNREADABLE = ("edit_list.mp4", "mirrored.mp4", "av1.mp4", "av1.mkv")
READABLE = [name for name in RECIPES if name not in UNREADABLE]


def numbers_in(frames: Frames, recipe: Recipe) -> list[int]:
    turns = -recipe.rotation_deg // 90
    return [number_in(np.rot90(image, turns)) for image in frames.data]


@pytest.mark.parametrize("name", READABLE)
def test_every_source_frame_is_shown_in_its_time(name: str, clip: Clip) -> None:
    """Frame k from its start to the next one's, counted from the first frame, as the encoder was told."""
    path, recipe = clip(name), RECIPES[name]
    starts = np.array(recipe.starts_s)
    shows = (starts[:-1] + starts[1:]) / 2
    times = [*(starts[:-1] + 0.002), *shows, *(starts[1:] - 0.002)]
    expected = recipe.numbers * 3
    for decode in (video.decode, reference_decode):
        frames = decode(path, times)
        assert numbers_in(frames, recipe) == expected, decode.__name__
        first_shown = np.array([recipe.numbers.index(number) for number in expected])
        assert np.abs(frames.pts_s - starts[first_shown]).max() < 0.0012, decode.__name__


@pytest.mark.parametrize("name", [name for name in READABLE if name.endswith(".avi")])
def test_single_frames_of_avi_are_those_of_the_whole(name: str, clip: Clip) -> None:
    """Seeking to a keyframe and decoding from there changes nothing."""
    path, recipe = clip(name), RECIPES[name]
    starts = np.array(recipe.starts_s)
    for index in range(0, recipe.num_frames, 7):
        time_s = (starts[index] + starts[index + 1]) / 2
        assert numbers_in(video.decode(path, [time_s], workers=1), recipe) == [recipe.numbers[index]]


@pytest.mark.parametrize("name", ["mpeg4.avi", "mpeg4_packed.avi", "mpeg4_many_b.avi"])
def test_streams_that_do_not_announce_b_pictures(name: str, clip: Clip) -> None:
    """libavcodec gives the first reference too early, and once more in its place."""
    data, recipe = without_control(clip(name).read_bytes()), RECIPES[name]
    starts = np.array(recipe.starts_s)
    times = (starts[:-1] + starts[1:]) / 2
    for frames in (
        reference_decode(data, times),
        video.decode(data, times, workers=1),
        video.decode(data, times, workers=2),
    ):
        assert numbers_in(frames, recipe) == recipe.numbers
    for index in (1, 2, 16, 31):
        assert numbers_in(video.decode(data, [times[index]]), recipe) == [index]


@pytest.mark.parametrize("name", ["h264.avi", "mpeg4.avi", "mpeg4_packed.avi", "mpeg2.avi", "mjpeg.avi"])
def test_sampling_picks_the_frames_it_names(name: str, clip: Clip) -> None:
    path, recipe = clip(name), RECIPES[name]
    info = video.probe(path)
    assert info.num_frames == recipe.num_frames
    assert info.fps == recipe.fps
    times_s = video.sample_times(info, num_frames=10)
    assert numbers_in(video.decode(path, times_s), recipe) == [6 * i for i in range(10)]


def test_frames_after_a_lost_one_keep_their_times(clip: Clip) -> None:
    """In AVI, H.264 frames get their times by counting: a packet without a frame shifts no other."""
    path, recipe = clip("h264.avi"), RECIPES["h264.avi"]
    bad = bytearray(path.read_bytes())
    position, size, _, is_key = packets_of(path)[20]
    assert not is_key
    bad[position : position + size] = bytes(size)
    frames = video.decode(bytes(bad), [start + 0.01 for start in recipe.starts_s[30:-1]])
    assert numbers_in(frames, recipe) == recipe.numbers[30:]
    assert frames.num_substituted == 0
