"""The length of a video is what is shown of it: a plain decode of the whole file is the witness.

Headers say otherwise: they count what edit lists hide, what was cut off and other tracks, or say nothing.

Modules: `video/containers/mp4_edits.py`, `video/containers/probe.py`, `video/containers/steady_clock.py`.
"""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from pathlib import Path

import av
import numpy as np
import pytest

from epd import video
from epd.errors import MediaError
from tests.video.conftest import Clip
from tests.video.edits import Edit, timescales, with_edits
from tests.video.joined import beside_sound, joined
from tests.video.plain_decoder import reference_decode
from tests.video.recipes import X264, Recipe, number_in, repeat
from tests.video.util import assert_same_frames

FPS, NUM_FRAMES = 30, 60  # of the clips
SECONDS = NUM_FRAMES / FPS
RATE = 16_000


def num_decoded(path: Path) -> int:
    """How many frames a plain decode shows, if it is past a packet that was cut."""
    number = 0
    with av.open(str(path)) as container, suppress(av.error.InvalidDataError):
        for _ in container.decode(video=0):
            number += 1
    return number


def numbers_shown(path: Path) -> list[int]:
    """The number in the frame at each place that the model may ask for."""
    facts = video.look(path)
    times_s = (np.arange(facts.num_frames) + 0.5) / facts.fps
    frames = video.decode(path, times_s)
    assert frames.num_substituted == 0
    assert_same_frames(frames, reference_decode(path, times_s))
    return [number_in(frame) for frame in frames.data]


def assert_shows(path: Path, numbers: list[int], rate: float = FPS) -> None:
    facts, info = video.look(path), video.probe(path)
    assert facts.num_frames == info.num_frames == len(numbers)
    assert facts.fps == info.fps == pytest.approx(rate, rel=0.01)
    assert info.duration_s == pytest.approx(len(numbers) / rate, abs=1 / rate)
    assert numbers_shown(path) == numbers


# What an edit list shows.


def edit(data: bytes, first: int, stop: int) -> Edit:
    """The edit that shows the frames [first, stop) of a clip."""
    movie, media = timescales(data)
    start_s = (first + 2) / FPS  # the first picture is shown after two ticks of it
    return round((stop - first) * movie / FPS), round(start_s * media)


def edited(clip: Clip, path: Path, *edits: tuple[int, int] | float) -> Path:
    """The clip with these parts, or gaps of so many seconds."""
    data = clip("h264_b.mp4").read_bytes()
    movie, _ = timescales(data)
    rows = [(round(each * movie), -1) if isinstance(each, float) else edit(data, *each) for each in edits]
    path.write_bytes(with_edits(data, rows))
    return path


@pytest.mark.parametrize(
    "edits",
    [
        ((20, 50),),
        ((0, 7),),
        ((47, 60),),
        (0.7, (20, 50)),
        ((5, 20), (40, 55)),
        ((40, 55), (5, 20)),
        ((10, 25), (10, 25)),
    ],
    ids=["middle", "head", "tail", "begins late", "two", "swapped", "twice"],
)
def test_an_edit_list(clip: Clip, tmp_path: Path, edits: tuple[tuple[int, int] | float, ...]) -> None:
    path = edited(clip, tmp_path / "edited.mp4", *edits)
    shown = [number for each in edits if isinstance(each, tuple) for number in range(*each)]
    assert num_decoded(path) == len(shown)
    assert_shows(path, shown)


def test_an_edit_that_is_longer_than_its_media(clip: Clip, tmp_path: Path) -> None:
    path = edited(clip, tmp_path / "edited.mp4", (30, 600))
    assert_shows(path, list(range(30, 60)))


def test_a_cut_far_behind_its_keyframe_is_turned_as_the_rest(clip: Clip, tmp_path: Path) -> None:
    """As of slow motion: more packets come before the first picture than are decoded in search of one."""
    turned = Recipe("slow.mp4", options={**X264, "g": "600"}, num_frames=240, gaps=(5,), rotation_deg=90)
    data = clip(turned).read_bytes()
    movie, media = timescales(data)
    path = tmp_path / "cut.mp4"
    path.write_bytes(with_edits(data, [(movie // 10, media * 225 // 120)]))
    facts, frames = video.look(path), video.decode(path, [0.05])
    assert (facts.num_frames, facts.height, facts.width) == (12, *frames.data.shape[1:3]) == (12, 128, 96)


def test_nothing_new_is_shown_in_a_gap_between_edits(clip: Clip, tmp_path: Path) -> None:
    """FFmpeg shows the media's beginning there; by ISO/IEC 14496-12 an empty edit shows nothing."""
    path = edited(clip, tmp_path / "gap.mp4", (5, 20), 0.7, (40, 55))
    info = video.probe(path)
    assert (info.num_frames, info.duration_s) == (30, pytest.approx(1.7, abs=0.01))
    frames = video.decode(path, [0.02, 0.49, 0.6, 1.1, 1.19, 1.22, 1.69])
    assert [number_in(frame) for frame in frames.data] == [5, 19, 19, 19, 19, 40, 54]


def test_drawn_trims_show_what_a_plain_decode_shows(clip: Clip, tmp_path: Path) -> None:
    """One part of any place and length, at any tick: also within frames, where FFmpeg drops the first."""
    data = clip("h264_b.mp4").read_bytes()
    movie, media = timescales(data)
    rng = random.Random(40)
    for number in range(25):
        first = rng.randrange(0, 55)
        start = round((first + 2) / FPS * media) + rng.choice([0, 0, rng.randrange(0, media // FPS)])
        path = tmp_path / f"{number}.mp4"
        path.write_bytes(with_edits(data, [(rng.randrange(movie // 10, 2 * movie), start)]))
        with av.open(str(path)) as container:
            shown = [number_in(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
        assert video.look(path).num_frames == len(shown), path
        assert numbers_shown(path) == shown, path


# A clock that starts again or jumps.


@pytest.mark.parametrize(
    ("name", "shifts_s"),
    [
        ("starts_again.ts", [0, 0]),
        ("ahead.ts", [0, 1000]),
        ("back.ts", [2000, 5]),
        ("many.ts", [0, 70, 3, 500]),
        ("ahead.flv", [0, 1000]),
    ],
)
def test_a_clock_that_jumps(clip: Clip, tmp_path: Path, name: str, shifts_s: list[float]) -> None:
    path = tmp_path / name
    if name.endswith(".ts"):  # each part is a recording of its own
        parts = [
            joined(clip("h264.ts"), tmp_path / "part.ts", [shift_s]).read_bytes() for shift_s in shifts_s
        ]
        path.write_bytes(b"".join(parts))
    else:
        joined(clip("h264.ts"), path, shifts_s)
    assert_shows(path, [*range(NUM_FRAMES)] * len(shifts_s))


def test_a_clock_that_wraps(clip: Clip, tmp_path: Path) -> None:
    """Its 33 bits are full after 26.5 hours."""
    path = joined(clip("h264.ts"), tmp_path / "wraps.ts", [95_441, 95_443])
    assert_shows(path, [*range(NUM_FRAMES)] * 2)


def test_a_pause_is_no_jump(clip: Clip, tmp_path: Path) -> None:
    path = joined(clip("h264.ts"), tmp_path / "pause.ts", [0, 5])
    info = video.probe(path)
    assert (info.num_frames, info.duration_s) == (2 * NUM_FRAMES, pytest.approx(7, abs=0.05))


# Another track that is longer, or begins earlier.


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "ts", "avi", "mov", "flv"])
@pytest.mark.parametrize(("picture_s", "sound_s"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.5)])
def test_sound_that_is_longer(
    clip: Clip, tmp_path: Path, suffix: str, picture_s: float, sound_s: float
) -> None:
    """AVI has no late start: there the muxer fills the time with empty chunks, which show the first frame."""
    source, path = clip("h264_no_b.avi" if suffix == "avi" else "h264_b.mp4"), tmp_path / f"both.{suffix}"
    if suffix == "avi" and picture_s:
        pytest.skip("AVI has no late start")
    beside_sound(source, path, picture_s=picture_s, sound_s=sound_s, seconds=5)
    assert_shows(path, [*range(NUM_FRAMES)])


@pytest.mark.parametrize("suffix", ["mkv", "mov", "ts"])
def test_a_part_of_the_sound_is_timed_as_the_picture_is(clip: Clip, tmp_path: Path, suffix: str) -> None:
    """And all of it begins where its track does."""
    path = beside_sound(
        clip("h264_b.mp4"), tmp_path / f"late.{suffix}", picture_s=0.5, sound_s=1.5, seconds=3
    )
    whole = video.load_audio(path, video.AudioSlice(RATE, 60 * RATE))
    assert len(whole) / RATE == pytest.approx(3, abs=0.1)
    part = video.load_audio(path, video.AudioSlice(RATE, 60 * RATE, 2.0, 2.5))
    assert len(part) == RATE // 2
    place = next(at for at in range(len(whole)) if np.array_equal(whole[at : at + 2000], part[:2000]))
    assert place / RATE == pytest.approx(1.0, abs=0.1)  # the sound begins a second after the picture


# Files that say no length, and headers that lie.


def live(source: Path, path: Path, container: str) -> Path:
    """Written to what cannot be sought in, as by a browser or a stream: without length and cues."""
    with path.open("wb") as file:
        pipe = type("Pipe", (), {"write": lambda _, data: file.write(data)})()
        with av.open(str(source)) as opened, av.open(pipe, "w", format=container) as out:
            stream = out.add_stream_from_template(opened.streams.video[0])
            for packet in opened.demux(opened.streams.video[0]):
                if packet.size:
                    packet.stream = stream
                    out.mux(packet)
    return path


@pytest.mark.parametrize(
    ("source", "container"), [("vp9.webm", "webm"), ("h264.mkv", "matroska"), ("h264.ts", "flv")]
)
def test_a_recording_without_length(clip: Clip, tmp_path: Path, source: str, container: str) -> None:
    path = live(clip(source), tmp_path / "live", container)
    assert_shows(path, [*range(NUM_FRAMES)])


@pytest.mark.parametrize(("source", "container"), [("h264_b.mp4", "h264"), ("hevc.mp4", "hevc")])
def test_a_raw_stream(clip: Clip, tmp_path: Path, source: str, container: str) -> None:
    """Its frames are numbered, at the rate that its headers say."""
    path = joined(clip(source), tmp_path / "raw", [0], container)
    assert_shows(path, [*range(NUM_FRAMES)])


@pytest.mark.parametrize("name", ["h264.mkv", "vp9.webm", "h264.ts", "h264_fragmented.mp4", "h264_no_b.avi"])
def test_a_recording_that_was_cut_off(clip: Clip, tmp_path: Path, name: str) -> None:
    whole = clip(name).read_bytes()
    path = tmp_path / name
    path.write_bytes(whole[: len(whole) * 6 // 10])
    facts = video.look(path)
    assert 0 < facts.num_frames < NUM_FRAMES
    assert abs(facts.num_frames - num_decoded(path)) <= 3  # what the cut packet and those after it show
    frames = video.decode(path, (np.arange(facts.num_frames) + 0.5) / facts.fps)
    numbers = [number_in(frame) for frame in frames.data]
    assert numbers == sorted(numbers)
    assert (numbers[0], len(set(numbers))) == (0, pytest.approx(facts.num_frames, abs=3))
    assert frames.num_substituted <= 2


def test_an_mp4_whose_end_was_cut_off(clip: Clip, tmp_path: Path) -> None:
    """Its tables come first and promise all of it."""
    path = tmp_path / "fast.mp4"
    with (
        av.open(str(clip("h264_b.mp4"))) as opened,
        av.open(str(path), "w", options={"movflags": "faststart"}) as out,
    ):
        stream = out.add_stream_from_template(opened.streams.video[0])
        for packet in opened.demux(opened.streams.video[0]):
            if packet.size:
                packet.stream = stream
                out.mux(packet)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 10])
    facts = video.look(path)
    assert 0 < facts.num_frames < NUM_FRAMES
    assert video.decode(path, (np.arange(facts.num_frames - 3) + 0.5) / facts.fps).num_substituted == 0


def test_a_header_that_lies(clip: Clip, tmp_path: Path) -> None:
    """About the length of an MP4 and its track, and the number of frames of an AVI."""
    data = bytearray(clip("h264_b.mp4").read_bytes())
    for box, place in ((b"mvhd", 20), (b"mdhd", 20), (b"tkhd", 24)):
        at = data.index(box) + place
        data[at : at + 4] = struct.pack(">I", struct.unpack_from(">I", data, at)[0] * 50)
    (tmp_path / "long.mp4").write_bytes(data)
    assert_shows(tmp_path / "long.mp4", [*range(NUM_FRAMES)])
    data = bytearray(clip("h264_no_b.avi").read_bytes())
    at = data.index(b"strh") + 8 + 32
    data[at : at + 4] = struct.pack("<I", 90_000)
    (tmp_path / "long.avi").write_bytes(data)
    assert_shows(tmp_path / "long.avi", [*range(NUM_FRAMES)])


@pytest.mark.parametrize("name", ["vfr.mp4", "vfr.ts", "vfr_open_gop.mkv", "late_start.mkv", "edit_list.mp4"])
def test_variable_rates_and_late_starts_end_with_the_last_frame(clip: Clip, name: str) -> None:
    info, path = video.probe(clip(name)), clip(name)
    assert info.num_frames == num_decoded(path)
    last = reference_decode(path, [1e6]).pts_s[0]
    assert last < info.duration_s < last + 0.2
    assert video.decode(path, [info.duration_s - 1e-3]).pts_s[0] == last


# What measuring costs.


def test_a_large_mkv_is_not_read_as_a_whole(
    clip: Clip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last GOP tells the end; a header's rate that does not hold there is not believed."""
    path = repeat(clip("h264_b.mp4"), tmp_path / "long.mkv", 10)
    whole = video.look(path)
    monkeypatch.setattr("epd.video.containers.probe._SMALL_BYTES", 0)
    monkeypatch.setattr("epd.video.containers.probe._Reading.whole", None)
    assert video.look(path) == whole
    assert whole.num_frames == 10 * NUM_FRAMES


def test_a_large_mkv_whose_rate_lies_is_read_as_a_whole(
    clip: Clip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames are counted from the start of the file, wherever the look at its end has left it."""
    path = repeat(clip("vfr.mp4"), tmp_path / "long.mkv", 4)
    monkeypatch.setattr("epd.video.containers.probe._SMALL_BYTES", 0)
    monkeypatch.setattr("epd.video.containers.probe._MIN_FRAMES_FOR_RATE", 1000)
    assert video.look(path).num_frames == 4 * NUM_FRAMES


@pytest.mark.parametrize("limits", [video.Limits(max_measure_s=0.0), video.Limits(max_frames=100)])
def test_reading_is_bounded(clip: Clip, tmp_path: Path, limits: video.Limits) -> None:
    """Then the claim of the header counts, and a file without one is refused."""
    assert video.look(clip("h264.ts"), limits=limits).num_frames == NUM_FRAMES
    path = live(repeat(clip("h264_b.mp4"), tmp_path / "long.mkv", 3), tmp_path / "live", "matroska")
    with pytest.raises(MediaError, match="length"):
        video.look(path, limits=limits)
