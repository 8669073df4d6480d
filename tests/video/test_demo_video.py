"""A demo video is real H.264 with B-frames and regular keyframes, and shows what its truth file says."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest

from epd.shapes import COLOURS, make_scene
from epd.video.demo_video import write_demo_video


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
