"""Lists of frames as files: what is in them, turned upright, and what is refused before decoding."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from epd import video
from epd.errors import CorruptMediaError, MediaLimitError, UnsupportedMediaError
from epd.types import UInt8Array
from tests.media import draw_frames

TURNED = 6  # EXIF: shown a quarter turn clockwise


def jpeg(frame: UInt8Array, orientation: int | None = None) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.fromarray(frame).save(file, "JPEG", exif=exif, quality=95)
    return file.getvalue()


def listed(*images: bytes, max_bytes: int = 1 << 20) -> bytes:
    uri = "data:video/jpeg;base64," + ",".join(base64.b64encode(image).decode() for image in images)
    return video.fetch(uri, video.FetchPolicy(max_bytes=max_bytes))


@pytest.mark.parametrize("orientation", [None, TURNED])
def test_frames_are_the_images_turned_upright(orientation: int | None) -> None:
    images = [jpeg(frame, orientation) for frame in draw_frames(5, 40, 60, seed=2)]
    whole = listed(*images)
    size = (40, 60) if orientation is None else (60, 40)
    assert video.look(whole) == video.MediaFacts("video", *size, 5, 1.0, is_frame_list=True)
    found = video.decode(whole, [0.5, 3.5, 3.9])
    expected = [video.load_image(images[index]) for index in (0, 3, 3)]
    assert np.array_equal(found.data, np.stack(expected))
    with video.stream(whole, [0.5, 1.5, 4.5], (28, 56), group_sizes=[2, 1]) as groups:
        assert [group.frames.data.shape for group in groups] == [(2, 28, 56, 3), (1, 28, 56, 3)]


def test_equal_frames_turned_differently_have_other_sizes() -> None:
    frame = next(draw_frames(1, 40, 60, seed=2))
    with pytest.raises(UnsupportedMediaError, match="frame 1 has 40 x 60 pixels, frame 0 has 60 x 40"):
        video.look(listed(jpeg(frame), jpeg(frame, TURNED)))


def test_frames_that_are_too_large_are_refused_by_their_headers() -> None:
    whole = listed(*(jpeg(frame) for frame in draw_frames(2, 40, 60, seed=2)))
    with pytest.raises(MediaLimitError, match="60 x 40 pixels; allowed 2399"):
        video.look(whole, limits=video.Limits(max_pixels=2399))
    assert video.look(whole, limits=video.Limits(max_pixels=2400)).num_frames == 2


def test_too_many_bytes_are_refused_before_they_are_decoded() -> None:
    image = jpeg(next(draw_frames(1, 40, 60, seed=2)))
    with pytest.raises(MediaLimitError, match="allowed 100"):
        listed(image, image, max_bytes=100)


def test_a_file_that_ends_within_a_frame_is_refused(tmp_path: Path) -> None:
    whole = listed(*(jpeg(frame) for frame in draw_frames(2, 40, 60, seed=2)))
    for num_bytes in (len(whole) - 1, 20, 17):
        path = tmp_path / f"{num_bytes}"
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(CorruptMediaError, match=r"ends within a frame|lists no frame"):
            video.look(path)
