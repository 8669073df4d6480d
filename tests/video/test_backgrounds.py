"""Clips of a folder play in loops behind scenes: cut to the frame, muted, the same each time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from epd import video
from epd.errors import RequestError
from epd.shapes import make_scene
from epd.video.backgrounds import BackgroundClips
from epd.video.demo_video import Filming, write_demo_video
from tests.media import write_video

TIMES_S = [0.0, 0.5, 1.9, 2.0, 2.5, 31.3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips of two seconds, and files that are none."""
    path = tmp_path_factory.mktemp("clips")
    for seed in (0, 1):
        write_video(path / f"{seed}.mp4", num_frames=20, fps=10, seed=seed)
    (path / "notes.txt").write_text("no video")
    (path / "more").mkdir()
    return path


def test_frames_are_those_of_the_clip_in_loops_with_half_the_contrast(folder: Path) -> None:
    played = np.stack(list(BackgroundClips(folder).play(7, TIMES_S, 90, 160)))
    truth = video.reference_decode(str(folder / "1.mp4"), [time_s % 2 for time_s in TIMES_S]).data
    assert np.array_equal(played, truth // 2 + 40)


@pytest.mark.parametrize(("height", "width"), [(90, 90), (64, 160), (200, 96)])
def test_a_clip_covers_any_frame_and_keeps_its_proportions(folder: Path, height: int, width: int) -> None:
    scale = max(height / 90, width / 160)
    size = round(90 * scale), round(160 * scale)
    (image,) = BackgroundClips(folder).play(0, [0.5], height, width)
    assert image.shape == (height, width, 3)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    full = video.decode(str(folder / "0.mp4"), [0.5], size).data[0]
    assert np.array_equal(image, full[top : top + height, left : left + width] // 2 + 40)


def test_a_video_before_a_clip_shows_it_and_says_so(folder: Path, tmp_path: Path) -> None:
    scene = make_scene(0, 5.0, 1)
    filming = Filming.of("still", folder)
    truth = write_demo_video(tmp_path / "v.mp4", scene, fps=4, height=90, width=160, filming=filming)
    assert json.loads(truth.read_text())["background"] == str(folder)
    clear = next(time_s for time_s in np.arange(0, 5, 0.25) if not scene.visible(float(time_s)))
    shown = video.reference_decode(str(tmp_path / "v.mp4"), [clear + 0.1]).data[0].astype(int)
    (expected,) = BackgroundClips(folder).play(0, [clear], 90, 160)
    assert np.abs(shown - expected).mean() < 6, "H.264 is lossy"


@pytest.mark.parametrize("names", [(), ("notes.txt",)])
def test_a_folder_without_videos_is_refused_in_one_line(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("no video")
    with pytest.raises(RequestError, match=rf"with {len(names)} files .* allowed: folders of videos; name"):
        BackgroundClips(tmp_path)
