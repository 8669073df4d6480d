"""What planning learns of a medium: the same as probing it, from one opening, within bounds for any claim.

Modules: `video/containers/limits.py`, `video/containers/mp4_boxes.py`, `video/containers/mp4_claims.py`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from epd import video
from epd.errors import CorruptMediaError, MediaError, MediaLimitError
from tests.video.conftest import Clip
from tests.video.corpus import corpus
from tests.video.recipes import RECIPES, make


@pytest.fixture(scope="module")
def movie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(RECIPES["rotated_90.mp4"], tmp_path_factory.mktemp("look") / "secret-name.mp4")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whatever FFmpeg is made to open."""
    found: list[object] = []
    open_media: Callable[..., object] = av.open
    monkeypatch.setattr(
        av, "open", lambda *args, **kwargs: found.append(args[0]) or open_media(*args, **kwargs)
    )
    return found


@pytest.mark.parametrize("name", ["rotated_90.mp4", "h264.mkv", "h264.ts", "mpeg4.avi", "vp9.webm"])
def test_the_same_as_probe_from_one_opening(clip: Clip, name: str, opened: list[object]) -> None:
    path = clip(name)
    info = video.probe(path)
    opened.clear()
    expected = video.MediaFacts("video", info.height, info.width, info.num_frames, info.fps)
    assert video.look(path) == expected
    assert len(opened) == 1


def test_an_image_is_read_by_its_header_alone(tmp_path: Path, opened: list[object]) -> None:
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(tmp_path / "x.png")
    whole = (tmp_path / "x.png").read_bytes()
    assert video.look(whole[:60]) == video.MediaFacts("image", 40, 60)
    assert opened == []


def with_runs(data: bytes, box: bytes, num_samples: int) -> bytes:
    """An MP4 whose first table of runs claims so many samples."""
    at = data.index(box)
    return data[: at + 12] + struct.pack(">I", num_samples) + data[at + 16 :]


@pytest.mark.parametrize("num_frames", [3_000_000, 50_000_000, 0xFFFFFFFF])
@pytest.mark.parametrize("box", [b"stts", b"stsz"])
def test_more_samples_than_bytes_are_refused_at_once(movie: Path, box: bytes, num_frames: int) -> None:
    data = with_runs(movie.read_bytes(), box, num_frames)
    seconds = []
    for _ in range(3):  # the collector, or another thread, may run in one of them
        began = time.thread_time()
        with pytest.raises(CorruptMediaError, match="samples in"):
            video.look(data)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 0.1


def test_a_fragment_that_claims_samples(tmp_path: Path) -> None:
    data = bytearray(make(RECIPES["h264_fragmented.mp4"], tmp_path / "f.mp4").read_bytes())
    assert video.look(bytes(data)).kind == "video"
    at = data.index(b"trun")
    data[at + 8 : at + 12] = struct.pack(">I", 80_000_000)
    with pytest.raises(CorruptMediaError, match="80000000 samples"):
        video.look(bytes(data))


def test_a_large_file_may_not_claim_more_frames_than_the_limit(movie: Path) -> None:
    with pytest.raises(MediaLimitError, match="frames"):
        video.look(movie, limits=video.Limits(max_frames=10))


def test_errors_call_the_medium_by_the_name_they_are_given(movie: Path, tmp_path: Path) -> None:
    path = tmp_path / "medium"
    with pytest.raises(MediaError, match=r"^no file at the second video"):
        video.look(video.Media(path, "the second video"))
    for variant in corpus({"video.mp4": movie}, per_damage=3):
        path.write_bytes(variant.data)
        message = error_of(path) or "the second video"
        assert message.startswith("the second video"), variant.name
        assert str(tmp_path) not in message, variant.name


def error_of(path: Path) -> str | None:
    try:
        video.look(video.Media(path, "the second video"))
    except MediaError as error:
        return str(error)
    return None
