"""Times that containers do not hold, or that FFmpeg guesses wrong: the number in each picture tells.

Modules: `video/decoding/session.py`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from epd import video
from epd.video.containers.avi_times import ProgramTimes
from tests.video.conftest import Clip
from tests.video.edits import timescales, with_edits
from tests.video.plain_decoder import reference_decode
from tests.video.recipes import Recipe, make, number_in

GOP = {"g": "15", "bf": "2"}
X264 = {**GOP, "preset": "ultrafast"}
UNEVEN = (20, 40, 10, 50)


def numbers_at(path: Path, times_s: Sequence[float]) -> list[int]:
    frames = video.decode(path, times_s)
    assert frames.num_substituted == 0
    assert [number_in(image) for image in reference_decode(path, times_s).data] == [
        number_in(image) for image in frames.data
    ]
    return [number_in(image) for image in frames.data]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("slow.h264", options=X264, gaps=(48,)),
        Recipe("fast.h264", options=X264, gaps=(5,)),
        Recipe("pictures.mjpeg", codec="mjpeg", pixel_format="yuvj420p", gaps=(24,)),
        Recipe("b.nut", options=X264),
        Recipe("late.nut", options=X264, start=600),
        Recipe("b.asf", options=X264),
        Recipe("plain.asf", options={**X264, "bf": "0"}),
        Recipe("late.asf", options={**X264, "bf": "0"}, start=3000),
        Recipe("uneven.asf", options={**X264, "bf": "0"}, gaps=UNEVEN),
        Recipe("b_vop.asf", codec="mpeg4", options=GOP),
        Recipe("wmv.asf", codec="wmv2", options={"g": "15"}, gaps=UNEVEN),
        Recipe("b.mpg", codec="mpeg2video", options=GOP, gaps=(24,)),
    ],
    ids=lambda recipe: recipe.name,
)
def test_each_frame_is_shown_in_its_time(recipe: Recipe, tmp_path: Path) -> None:
    path = make(recipe, tmp_path / recipe.name)
    edges_s = np.array(recipe.starts_s)
    assert numbers_at(path, list((edges_s[:-1] + edges_s[1:]) / 2)) == recipe.numbers
    facts = video.look(path)
    assert facts.num_frames == recipe.num_frames
    assert facts.num_frames / facts.fps == pytest.approx(edges_s[-1], abs=0.11)


def test_a_photo_with_a_preview_is_no_video() -> None:
    """Pictures that the first one lists, or of another size, belong to it."""
    large, small, listed = io.BytesIO(), io.BytesIO(), io.BytesIO()
    for file, width, kind in ((large, 64, "JPEG"), (small, 32, "JPEG"), (listed, 64, "MPO")):
        image = Image.new("RGB", (width, 48), (10, 200, 30))
        more = {"save_all": True, "append_images": [image]} if kind == "MPO" else {}
        image.save(file, kind, **more)
    for data in (large.getvalue(), large.getvalue() + small.getvalue(), listed.getvalue()):
        assert video.look(data).kind == "image"
    assert video.look(large.getvalue() * 30).kind == "video"
    assert video.look(large.getvalue()[:-2] + b"trailer").kind == "image"


# Program streams.


def program_packet(picture: int, dts: int, pts: int) -> av.Packet:
    packet = av.Packet(bytes((0, 0, 1, 0, 0, picture << 3, 0, 0)))
    packet.dts, packet.pts, packet.duration = dts, pts, 10
    return packet


@pytest.mark.parametrize(
    ("pictures", "expected"),
    [
        # As they should be: nothing is changed.
        ([("I", 0, 10), ("P", 10, 40), ("B", 20, 20), ("B", 30, 30), ("P", 40, 50)], [10, 40, 20, 30, 50]),
        # A reference that is shown with its B-picture, and those after it that FFmpeg counts from there.
        (
            [
                ("I", 10, 20), ("B", 20, 20), ("B", 30, 30),
                ("P", 20, 30), ("B", 30, 30), ("B", 40, 40), ("P", 70, 100),
            ],
            [40, 20, 30, 70, 50, 60, 100],
        ),
        # The last one of a file.
        ([("P", 0, 30), ("B", 10, 10), ("B", 20, 20), ("I", 30, 40), ("B", 40, 40)], [30, 10, 20, 50, 40]),
    ],
    ids=["whole", "cut start code", "end"],
)  # fmt: skip
def test_no_two_pictures_of_a_program_stream_are_shown_at_once(
    pictures: Sequence[tuple[str, int, int]], expected: list[int]
) -> None:
    times = ProgramTimes()
    packets = [program_packet("?IPB".index(kind), dts, pts) for kind, dts, pts in pictures]
    out = [each for packet in packets for each in times.push(packet)] + list(times.finish())
    assert [packet.pts for packet in out] == expected


def test_a_start_code_that_is_cut_in_two(tmp_path: Path) -> None:
    """In some of these lengths of frames, a header lies in two packets of the program stream."""
    for width in (128, 144, 160, 176):
        recipe = Recipe("cut.mpg", codec="mpeg2video", options=GOP, gaps=(24,), num_frames=250, width=width)
        path = make(recipe, tmp_path / recipe.name)
        assert numbers_at(path, [(index + 0.5) / 25 for index in range(250)]) == list(range(250)), width


# Edit lists of several parts.


@pytest.mark.parametrize("name", ["h264_b.mp4", "hevc.mp4", "open_gop.mp4", "one_gop.mp4", "mjpeg.mov"])
def test_parts_that_begin_within_groups_of_pictures(clip: Clip, tmp_path: Path, name: str) -> None:
    options = {
        "hevc.mp4": {"preset": "ultrafast", "x265-params": "log-level=none:keyint=20:bframes=3"},
        "open_gop.mp4": {"preset": "ultrafast", "x264-params": "open-gop=1:keyint=20:bframes=3:scenecut=0"},
        "one_gop.mp4": {**X264, "g": "1000"},
    }
    codec = {"hevc.mp4": "libx265", "mjpeg.mov": "mjpeg"}.get(name, "libx264")
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    recipe = Recipe(
        name,
        codec,
        {} if codec == "mjpeg" else options.get(name, X264),
        num_frames=120,
        pixel_format=pixel_format,
    )
    data = make(recipe, tmp_path / name).read_bytes()
    shown = [*range(7, 23), *range(88, 101), *range(50, 61)]
    path = tmp_path / f"edited_{name}"
    path.write_bytes(with_edits(data, [part(data, each) for each in ((7, 23), (88, 101), (50, 61))]))
    facts = video.look(path)
    assert (facts.num_frames, facts.fps) == (len(shown), pytest.approx(30, rel=0.01))
    times_s = [(index + 0.5) / facts.fps for index in range(len(shown))]
    assert numbers_at(path, times_s) == shown
    with video.stream(path, times_s, groups_ahead=1, group_size=4) as groups:
        assert [number_in(image) for group in groups for image in group.frames.data] == shown


def part(data: bytes, frames: tuple[int, int]) -> tuple[int, int]:
    """The edit that shows the frames [start, stop) of a clip at 30 per second."""
    movie, media = timescales(data)
    at = data.index(b"elst") + 16
    first = int.from_bytes(data[at : at + 4], signed=True)  # when the media's first picture is shown
    return int((frames[1] - frames[0]) * movie / 30), first + round(frames[0] * media / 30)


def test_a_still_stays_for_its_edit(clip: Clip, tmp_path: Path) -> None:
    """Rate 0 shows one picture of the media: ISO/IEC 14496-12, 8.6.6."""
    data = clip("h264_b.mp4").read_bytes()
    movie, _ = timescales(data)
    edits = [part(data, (5, 20)), (2 * movie, part(data, (40, 41))[1])]
    edited = bytearray(with_edits(data, edits))
    edited[edited.index(b"elst") + 12 + 12 + 8 : edited.index(b"elst") + 12 + 12 + 12] = bytes(4)
    path = tmp_path / "still.mp4"
    path.write_bytes(edited)
    info = video.probe(path)
    assert (info.num_frames, info.duration_s) == (16, pytest.approx(2.5, abs=0.01))
    assert numbers_at(path, [0.02, 0.48, 0.52, 1.5, 2.49]) == [5, 19, 40, 40, 40]


def test_many_parts_cost_no_memory(clip: Clip, tmp_path: Path) -> None:
    """Each of many edits may claim to show all of the media."""
    data = clip("h264_b.mp4").read_bytes()
    path = tmp_path / "many.mp4"
    path.write_bytes(with_edits(data, [part(data, (0, 60))] * 5000))
    assert video.look(path).num_frames == 300_000
    assert numbers_at(path, [9_998.02, 9_999.98]) == [0, 59]


# Files that end within a packet.


@pytest.mark.parametrize("suffix", ["flv", "ts", "mkv"])
def test_what_is_cut_through_is_not_counted(tmp_path: Path, suffix: str) -> None:
    recipe = Recipe(f"cut.{suffix}", options={**X264, "bf": "0"})
    data = make(recipe, tmp_path / recipe.name).read_bytes()
    path = tmp_path / recipe.name
    for per_mille in (500, 557, 603, 666):
        path.write_bytes(data[: len(data) * per_mille // 1000])
        facts = video.look(path)
        times_s = [(index + 0.5) / facts.fps for index in range(facts.num_frames)]
        frames = video.decode(path, times_s)
        assert frames.num_substituted == 0
        assert [number_in(image) for image in frames.data] == list(range(facts.num_frames)), per_mille
