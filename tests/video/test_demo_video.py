"""A demo video is real H.264 with B-frames and regular keyframes, and shows what its truth file says."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest

from epd import video
from epd.errors import RequestError
from epd.shapes import COLOURS, make_scene
from epd.video.demo_video import BackgroundClips, Filming, write_demo_video
from tests.media import write_video
from tests.video.plain_decoder import reference_decode


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "demo.mp4"
    write_demo_video(out, make_scene(7, 12.0), fps=8, height=180, width=320)
    return out


def test_it_is_h264_with_b_frames_and_a_keyframe_every_two_seconds(demo: Path) -> None:
    with av.open(str(demo)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        assert stream.codec_context.name == "h264"
        assert (stream.width, stream.height, stream.average_rate) == (320, 180, 8)
    assert len(frames) == 12 * 8
    assert [index for index, frame in enumerate(frames) if frame.key_frame] == list(range(0, 96, 16))
    assert any(frame.pict_type == av.video.frame.PictureType.B for frame in frames)


def test_decoded_pixels_agree_with_the_truth_file(demo: Path) -> None:
    truth = json.loads(demo.with_suffix(".json").read_text())
    scene = make_scene(truth["seed"], truth["duration_s"])
    assert [item["shape"] for item in truth["objects"]] == [item.shape for item in scene.objects]
    looked_at = 0
    with av.open(str(demo)) as container:
        for frame in container.decode(video=0):
            time_s = float(frame.time or 0)
            pixels = frame.to_ndarray(format="rgb24").astype(int)
            for item in (item for item in scene.visible(time_s) if item.shape != "ring"):
                x, y = item.position(time_s)
                colour = np.array(COLOURS[item.colour])
                assert np.abs(pixels[round(y * 180), round(x * 320)] - colour).max() <= 60, (item, time_s)
                looked_at += 1
    assert looked_at > 20


def test_truth_holds_questions_with_answers(demo: Path) -> None:
    questions = json.loads(demo.with_suffix(".json").read_text())["questions"]
    assert {"kind", "question", "answer"} == set(questions[0])
    assert len({entry["kind"] for entry in questions}) >= 5


def test_a_longer_video_needs_no_more_memory(tmp_path: Path) -> None:
    def peak_bytes(duration_s: float) -> int:
        tracemalloc.start()
        write_demo_video(tmp_path / "v.mp4", make_scene(1, duration_s, 1), fps=6, height=90, width=160)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(4.0)
    assert peak_bytes(60.0) < 1.1 * peak_bytes(6.0)


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
    truth = reference_decode(str(folder / "1.mp4"), [time_s % 2 for time_s in TIMES_S]).data
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
    shown = reference_decode(str(tmp_path / "v.mp4"), [clear + 0.1]).data[0].astype(int)
    (expected,) = BackgroundClips(folder).play(0, [clear], 90, 160)
    assert np.abs(shown - expected).mean() < 6, "H.264 is lossy"


@pytest.mark.parametrize("names", [(), ("notes.txt",)])
def test_a_folder_without_videos_is_refused_in_one_line(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("no video")
    with pytest.raises(RequestError, match=rf"with {len(names)} files .* allowed: folders of videos; name"):
        BackgroundClips(tmp_path)
