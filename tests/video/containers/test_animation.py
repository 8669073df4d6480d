"""Animated pictures as videos: every frame as its format means it, at its true time, once. Within limits.

Modules: `video/containers/animated_files.py`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from epd import video
from epd.errors import CancelledError, CorruptMediaError, MediaError, MediaLimitError
from epd.types import UInt8Array
from tests.video.pictures import CLEAR, KEEP, RESTORE, Part, apng, drawn, gif, png, webp

SIZE = (16, 12)
RED, GREEN, BLUE, NOTHING = (255, 0, 0, 255), (0, 255, 0, 255), (0, 0, 255, 255), (77, 88, 99, 0)
Writer = Callable[[tuple[int, int], Sequence[Part]], bytes]
WRITERS: dict[str, Writer] = {"gif": gif, "apng": apng, "webp": webp}


def fill(colour: tuple[int, int, int, int], width: int = 16, height: int = 12) -> UInt8Array:
    return np.full((height, width, 4), colour, np.uint8)


def slides(*colours: tuple[int, int, int, int], delay_ms: int = 100) -> list[Part]:
    return [Part(fill(colour), delay_ms=delay_ms) for colour in colours]


def middles(parts: Sequence[Part]) -> list[float]:
    ends = np.cumsum([part.delay_ms for part in parts])
    return [float(end - part.delay_ms / 2) / 1000 for end, part in zip(ends, parts, strict=True)]


def check(data: bytes, parts: Sequence[Part], most: int = 0) -> None:
    """Every frame is on screen in its time, as `drawn` draws it."""
    found = video.decode(data, middles(parts))
    expected = np.stack(drawn(SIZE, parts))
    assert np.abs(found.data.astype(int) - expected).max() <= most
    starts = np.cumsum([0, *(part.delay_ms for part in parts)])[:-1] / 1000
    assert np.allclose(found.pts_s, starts)


# What each format has.
WAYS = [
    *(("gif", disposal, True) for disposal in (KEEP, CLEAR, RESTORE)),
    *(("apng", disposal, is_over) for disposal in (KEEP, CLEAR, RESTORE) for is_over in (True, False)),
    *(("webp", disposal, is_over) for disposal in (KEEP, CLEAR) for is_over in (True, False)),
]


@pytest.mark.parametrize(("kind", "disposal", "is_blended"), WAYS)
def test_disposal_and_blending(kind: str, disposal: int, is_blended: bool) -> None:
    hole = fill(GREEN, 8, 6)
    hole[:, :4] = NOTHING
    parts = [
        Part(fill(RED), delay_ms=100),
        Part(hole, 4, 2, 250, disposal, is_blended),
        Part(fill(BLUE, 4, 4), 8, 4, 400),
        Part(fill(NOTHING, 2, 2), 10, 6, 500, KEEP, is_blended),
    ]
    check(WRITERS[kind](SIZE, parts), parts)


@pytest.mark.parametrize("kind", WRITERS)
def test_what_no_frame_has_drawn_is_white(kind: str) -> None:
    """Nothing is there: neither black, nor the background that a GIF or a WebP names."""
    parts = [
        Part(fill(RED, 4, 4), 2, 2, 100, CLEAR),
        Part(fill(BLUE, 4, 4), 10, 6, 100, CLEAR),
        Part(fill(GREEN, 2, 2), 0, 0, 100),
    ]
    if kind == "apng":  # whose first frame is as large as the picture
        parts[0] = Part(fill(RED), 0, 0, 100, CLEAR)
    check(WRITERS[kind](SIZE, parts), parts)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["apng", "webp"])
def test_half_transparent_frames_drawn_at_random(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [Part(rng.integers(0, 256, (12, 16, 4), np.uint8))]
    for _ in range(6):
        width, height = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        x, y = 2 * int(rng.integers(0, 4)), 2 * int(rng.integers(0, 2))
        disposal = int(rng.choice([KEEP, CLEAR] + [RESTORE] * (kind == "apng")))
        pixels = rng.integers(0, 256, (height, width, 4), np.uint8)
        parts.append(Part(pixels, x, y, int(rng.integers(11, 400)), disposal, bool(rng.integers(2))))
    check(WRITERS[kind](SIZE, parts), parts, most=3)  # 8 bits of alpha at each step


@pytest.mark.parametrize("seed", range(6))
def test_gif_frames_drawn_at_random(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(8):
        width, height = int(rng.integers(1, 17)), int(rng.integers(1, 13))
        pixels = 85 * rng.integers(0, 4, (height, width, 4), np.uint8)
        pixels[..., 3] = 255 * (pixels[..., 3] > 0)
        pixels[pixels[..., 3] == 0, :3] = 7
        x, y = int(rng.integers(0, 17 - width)), int(rng.integers(0, 13 - height))
        delay_ms = 10 * int(rng.integers(2, 50))
        parts.append(Part(pixels, x, y, delay_ms, int(rng.choice([KEEP, CLEAR, RESTORE]))))
    data = gif(SIZE, parts)
    check(data, parts)
    assert np.array_equal(video.load_image(data), drawn(SIZE, parts)[0])


@pytest.mark.parametrize("kind", WRITERS)
def test_libraries_files_are_read(kind: str) -> None:
    """As Pillow writes them, which joins equal frames and cuts others to what changes."""
    rng = np.random.default_rng(3)
    small = rng.integers(0, 2, (5, 3, 4, 3), np.uint8) * 255
    frames = [Image.fromarray(each.repeat(8, 0).repeat(8, 1)) for each in small]
    file = io.BytesIO()
    options = {"lossless": True} if kind == "webp" else {}
    name = {"gif": "GIF", "apng": "PNG", "webp": "WEBP"}[kind]
    frames[0].save(
        file, name, save_all=True, append_images=frames[1:], duration=[40, 80, 120, 160, 200], **options
    )
    found = video.decode(file.getvalue(), [0.02, 0.05, 0.2, 0.3, 0.5, 9.0])
    expected = [np.asarray(frames[index]) for index in (0, 1, 2, 3, 4, 4)]
    assert np.array_equal(found.data, np.stack(expected))
    assert np.allclose(found.pts_s, [0, 0.04, 0.12, 0.24, 0.4, 0.4])


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("delay_ms", [0, 10])
def test_very_short_delays_are_shown_for_100_ms_as_browsers_do(kind: str, delay_ms: int) -> None:
    data = WRITERS[kind](SIZE, slides(RED, GREEN, BLUE, delay_ms=delay_ms))
    facts = video.look(data)
    assert (facts.num_frames, facts.fps) == (3, pytest.approx(10))
    found = video.decode(data, [0.05, 0.15, 0.25])
    assert [tuple(frame[0, 0]) for frame in found.data] == [RED[:3], GREEN[:3], BLUE[:3]]


@pytest.mark.parametrize("kind", WRITERS)
def test_20_ms_are_20_ms(kind: str) -> None:
    assert video.look(WRITERS[kind](SIZE, slides(RED, GREEN, delay_ms=20))).fps == pytest.approx(50)


@pytest.mark.parametrize("kind", WRITERS)
def test_facts_of_a_video_that_can_be_an_image(kind: str) -> None:
    data = WRITERS[kind](SIZE, slides(RED, GREEN, BLUE, delay_ms=500))
    facts = video.look(data)
    assert facts == video.MediaFacts("video", 12, 16, 3, 2.0, num_pictures=3)
    assert facts.num_unseen == 0
    as_image = facts.taken_as("image")
    assert (as_image.kind, as_image.num_frames, as_image.num_unseen) == ("image", 0, 2)
    assert facts.taken_as("video") == facts.taken_as(None) == facts
    assert video.media_kind(data) == "video"
    assert np.array_equal(video.load_image(data), fill(RED)[..., :3])


def test_one_frame_is_an_image() -> None:
    for data in (gif(SIZE, slides(RED)), apng(SIZE, slides(RED)), webp(SIZE, slides(RED))):
        assert video.look(data) == video.MediaFacts("image", 12, 16)
        assert video.look(data).taken_as("image").num_unseen == 0
        assert video.media_kind(data) == "image"


def test_every_frame_has_a_tick_of_the_clock_that_is_sampled() -> None:
    """Frames of 0.2, 0.3 and 2 s on a clock of 5 ticks a second: no frame lies between two ticks."""
    lengths = ((RED, 200), (GREEN, 300), (BLUE, 2000))
    data = gif(SIZE, [Part(fill(colour), delay_ms=length) for colour, length in lengths])
    facts = video.look(data)
    assert (facts.num_frames, facts.fps) == (12, pytest.approx(5))
    times = [(tick + 0.5) / facts.fps for tick in range(facts.num_frames)]
    assert sorted(set(video.decode(data, times).pts_s.tolist())) == pytest.approx([0, 0.2, 0.5])


def test_the_still_picture_of_an_apng_is_no_frame_of_it() -> None:
    parts = slides(RED, GREEN)
    data = apng(SIZE, parts, default=fill(BLUE))
    assert np.array_equal(video.load_image(data), fill(BLUE)[..., :3])
    assert video.look(data).num_pictures == 2
    check(data, parts)


def test_orientation_turns_every_frame() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    half = fill(RED)
    half[:6] = GREEN
    parts = [Part(fill(BLUE)), Part(half)]
    for data in (
        apng(SIZE, parts, (b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))),
        webp(SIZE, parts, exif.tobytes()),
    ):
        assert (video.look(data).height, video.look(data).width) == (16, 12)
        found = video.decode(data, [0.15]).data[0]
        assert found.shape == (16, 12, 3)
        assert tuple(found[0, 0]) == RED[:3]
        assert tuple(found[0, -1]) == GREEN[:3]
        assert video.load_image(data).shape == (16, 12, 3)


def test_frames_are_asked_for_in_any_order_and_size() -> None:
    parts = slides(RED, GREEN, BLUE)
    data = gif(SIZE, parts)
    found = video.decode(data, [0.25, 0.05, 0.15, 0.05], (24, 32))
    assert [tuple(frame[3, 3]) for frame in found.data] == [BLUE[:3], RED[:3], GREEN[:3], RED[:3]]
    with video.stream(data, [0.05, 0.15, 0.25], group_sizes=[2, 1]) as groups:
        assert [len(group.frames) for group in groups] == [2, 1]


def test_a_background_of_ones_own() -> None:
    parts = [Part(fill(RED)), Part(fill(NOTHING), is_blended=False)]
    found = video.decode(apng(SIZE, parts), [0.15], background=(1, 2, 3))
    assert (found.data == [1, 2, 3]).all()


def test_a_sequence_of_avif_with_alpha() -> None:
    """Frames of 0.1, 0.2 and 0.7 s; the second is clear, over a colour that must not show."""
    file = io.BytesIO()
    frames = [Image.fromarray(np.full((64, 64, 4), colour, np.uint8)) for colour in (RED, NOTHING, BLUE)]
    frames[0].save(
        file, "AVIF", save_all=True, append_images=frames[1:], duration=[100, 200, 700], quality=100
    )
    data = file.getvalue()
    facts = video.look(data)
    assert (facts.kind, facts.num_pictures, facts.num_frames) == ("video", 3, 10)
    found = video.decode(data, [0.95, 0.05, 0.15])
    assert np.allclose(found.pts_s, [0.3, 0, 0.1])
    for frame, colour in zip(found.data, (BLUE[:3], RED[:3], (255, 255, 255)), strict=True):
        assert np.abs(frame[32, 32].astype(int) - colour).max() <= 8
    assert video.load_image(data)[0, 0].argmax() == 0
    assert facts.taken_as("image").num_unseen == 2


# Damage and limits


@pytest.mark.parametrize("kind", ["gif", "apng"])
def test_a_file_that_was_cut_off_has_the_frames_before_the_cut(kind: str) -> None:
    noise = np.random.default_rng(1).integers(0, 2, (3, 12, 16, 4), np.uint8) * 255
    noise[..., 3] = 255
    parts = [Part(pixels) for pixels in noise]
    data = WRITERS[kind](SIZE, parts)
    cut = data[: -len(data) // 6]
    assert video.look(cut).num_pictures == 2
    found = video.decode(cut, [0.05, 0.15])
    assert np.array_equal(found.data, noise[:2, ..., :3])


def test_a_webp_that_was_cut_off_is_refused() -> None:
    data = webp(SIZE, slides(RED, GREEN, BLUE))
    with pytest.raises(CorruptMediaError, match="copy it again"):
        video.look(data[:-20])


@pytest.mark.parametrize("kind", WRITERS)
def test_damage_and_any_cut_end_in_typed_errors(kind: str) -> None:
    data = WRITERS[kind](SIZE, slides(RED, GREEN, BLUE))
    rng = np.random.default_rng(5)
    for place in rng.integers(8, len(data), 60).tolist():
        for broken in (data[:place], data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]):
            with suppress(MediaError):
                facts = video.look(broken)
                video.load_image(broken)
                if facts.kind == "video":
                    video.decode(broken, [0.05, 0.15, 0.25])


def test_too_many_frames_and_too_large_canvases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = gif(SIZE, slides(RED, GREEN, BLUE))
    with pytest.raises(MediaLimitError, match="192 pixels a frame; allowed 191"):
        video.look(data, limits=video.Limits(max_pixels=191))
    with pytest.raises(MediaLimitError, match=r"seconds; allowed 0\.2"):
        video.look(data, limits=video.Limits(max_duration_s=0.2))
    with monkeypatch.context() as patch:
        patch.setattr("epd.video.containers.animation.MAX_ANIMATION_PIXELS", 3 * 192 - 1)
        with pytest.raises(MediaLimitError, match="576 pixels in all frames"):
            video.look(data)
        with pytest.raises(MediaLimitError, match="576 pixels in all frames"):
            video.decode(data, [0.1])
    monkeypatch.setattr("epd.video.containers.animated_files.MAX_ANIMATION_FRAMES", 2)
    with pytest.raises(MediaLimitError, match="allowed 2"):
        video.look(data)


def test_a_frame_larger_than_its_canvas_is_cut_to_it_and_a_huge_one_refused() -> None:
    parts = [Part(fill(RED)), Part(fill(BLUE, 40, 40), 8, 6)]
    data = gif(SIZE, parts)
    found = video.decode(data, [0.15]).data[0]
    assert found.shape == (12, 16, 3)
    assert tuple(found[11, 15]) == BLUE[:3]
    assert tuple(found[0, 0]) == RED[:3]
    huge = data.replace(b"\x08\0\x06\0\x28\0\x28\0", b"\0\0\0\0\xff\xff\xff\xff")
    assert huge != data
    with pytest.raises(MediaLimitError, match="65535 x 65535"):
        video.decode(huge, [0.15])


def test_closing_stops_between_two_frames() -> None:
    groups = video.stream(gif(SIZE, slides(RED, GREEN)), [0.05, 0.15], group_sizes=[1, 1])
    next(groups)
    groups.close()
    with pytest.raises(CancelledError):
        next(groups)


def test_a_still_png_is_not_read_beyond_its_header() -> None:
    data = png((2, 1), 8, 0, [b"\0\1"])
    assert video.look(data[:50]).kind == "image"
