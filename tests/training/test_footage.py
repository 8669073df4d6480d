"""However a scene is filmed, looking at the frames finds its truth; filmed plainly, not a bit changes."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd import video
from epd.errors import RequestError
from epd.shapes import COLOURS, Scene, SceneRenderer, make_questions, make_scene
from epd.shapes.world import NUM_LANES
from epd.types import UInt8Array
from tests.media import write_video
from tests.shapes.test_world import answer_by_looking
from tests.video.plain_decoder import reference_decode
from training.footage import (
    LEVELS,
    STILL,
    BackgroundClips,
    FilmedRenderer,
    Filming,
    Footage,
    footage_level,
    write_filmed,
)

HEIGHT, WIDTH = 90, 160
STEP_S = 0.5
# Of 24 frames of a scene of 24 s, 160x90, as they were drawn before footage could be chosen.
DIGESTS = {
    0: "791238bd8e6b7b50929770153df2c087d94b1d8c2acda4a7b0e972c0ae4c792a",
    7: "51890509c98f71aa37c62f0d15f538d8088d6f7d527c562e4d85b4a475dad316",
    2_000_000_123: "8440bedb5e588285e76bacf18aa7e454599e3a91ab5c88d5f6d3aa5c29068c0f",
}


@pytest.mark.parametrize("kind", [SceneRenderer, FilmedRenderer])
@pytest.mark.parametrize("seed", DIGESTS)
def test_still_footage_draws_what_was_always_drawn(seed: int, kind: type[SceneRenderer]) -> None:
    renderer = kind(make_scene(seed, 24.0), HEIGHT, WIDTH)
    pixels = b"".join(renderer.frame(index + 0.25).tobytes() for index in range(24))
    assert hashlib.sha256(pixels).hexdigest() == DIGESTS[seed]


def _looked_at(scene: Scene, footage: Footage, background: UInt8Array | None = None) -> Scene:
    """The scene as its frames show it, against those of the empty scene; what never shows is left out.

    Times are the first and last at which something of an object's colour is seen.
    """
    filled = FilmedRenderer(scene, HEIGHT, WIDTH, footage)
    empty = FilmedRenderer(replace(scene, objects=()), HEIGHT, WIDTH, footage)
    shown: dict[str, list[float]] = {}
    for time_s in np.arange(0, scene.duration_s, STEP_S):
        seen = filled.frame(time_s, background), empty.frame(time_s, background)
        for lane in range(NUM_LANES):
            colour = _colour_in(lane, *seen)
            if colour is not None:
                shown.setdefault(colour, []).append(time_s)
    found = [
        replace(item, start_s=shown[item.colour][0], end_s=shown[item.colour][-1] + STEP_S)
        for item in scene.objects
        if item.colour in shown
    ]
    assert len(shown) == len(found), "a colour was seen that no object has"
    return replace(scene, objects=tuple(found))


def _colour_in(lane: int, frame: UInt8Array, empty: UInt8Array) -> str | None:
    """The colour nearest to that of a lane's pixels that an object covers; None if these are hardly any."""
    columns = slice(lane * WIDTH // NUM_LANES, (lane + 1) * WIDTH // NUM_LANES)
    covered = np.abs(frame[:, columns].astype(int) - empty[:, columns]).max(axis=-1) > 30
    # Half of the least object that is drawn, a star of half its size.
    if covered.sum() < 40:
        return None
    mean = frame[:, columns][covered].mean(axis=0)
    return max(COLOURS, key=lambda name: _cosine(mean, np.array(COLOURS[name])))


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("level", LEVELS)
@given(seed=st.integers(0, 2**31), duration_s=st.floats(4, 30))
@settings(max_examples=8, deadline=None)
def test_looking_at_the_frames_finds_every_answer(level: str, seed: int, duration_s: float) -> None:
    scene = make_scene(seed, duration_s)
    looked_at = _looked_at(scene, LEVELS[level])
    assert [item.shape for item in looked_at.objects] == [item.shape for item in scene.objects]
    for item, seen in zip(scene.objects, looked_at.objects, strict=True):
        assert abs(item.start_s - seen.start_s) <= STEP_S
        assert abs(item.end_s - seen.end_s) <= STEP_S
    for question in make_questions(scene, random.Random(seed), num_per_kind=2):
        assert question.answer == answer_by_looking(looked_at, question), question.text


def test_clips_as_backgrounds_hide_nothing() -> None:
    """Backgrounds of the range that clips are muted to."""
    scene = make_scene(3, 30.0, 6)
    background = np.random.default_rng(0).integers(40, 168, (HEIGHT, WIDTH, 3), np.uint8)
    looked_at = _looked_at(scene, LEVELS["wild"], background)
    assert [item.shape for item in looked_at.objects] == [item.shape for item in scene.objects]


@pytest.mark.parametrize("level", LEVELS)
def test_at_every_moment_most_of_an_object_is_seen(level: str) -> None:
    """Posts pass, and hide at most three fifths of an object at a time; without posts it is all seen."""
    scene = make_scene(12, 32.0, 6)
    posts = replace(STILL, num_posts=LEVELS[level].num_posts, sizes=LEVELS[level].sizes)
    plain = replace(posts, num_posts=0)
    areas = [_areas(scene, footage) for footage in (posts, plain)]
    shares = areas[0][areas[1] > 0] / areas[1][areas[1] > 0]
    assert shares.min() >= 0.4
    assert (shares.min() < 0.9) == (posts.num_posts > 0)


def _areas(scene: Scene, footage: Footage) -> np.ndarray:
    """Pixels by moment and lane that an object covers: int [moments, lanes]."""
    filled, empty = (
        FilmedRenderer(each, HEIGHT, WIDTH, footage) for each in (scene, replace(scene, objects=()))
    )
    rows = []
    for time_s in np.arange(0, scene.duration_s, STEP_S):
        differs = (filled.frame(time_s) != empty.frame(time_s)).any(axis=-1)
        rows.append([lane.sum() for lane in np.array_split(differs, NUM_LANES, axis=1)])
    return np.array(rows)


def test_each_setting_changes_the_picture_and_the_same_seed_gives_the_same() -> None:
    scene = make_scene(5, 20.0, 2)
    plain = _clip(scene, STILL)
    changes = [
        {"pan_per_s": 0.02},
        {"shake": 0.01},
        {"noise": 5.0},
        {"lighting": 0.2},
        {"num_posts": 2},
        {"sizes": (0.5, 0.6)},
        {"has_label": True},
    ]
    for change in changes:
        footage = Footage(**change)  # type: ignore[arg-type]
        assert np.array_equal(_clip(scene, footage), _clip(scene, footage)), change
        assert not np.array_equal(_clip(scene, footage), plain), change


def _clip(scene: Scene, footage: Footage) -> UInt8Array:
    renderer = FilmedRenderer(scene, HEIGHT, WIDTH, footage)
    return np.stack([renderer.frame(time_s) for time_s in np.linspace(0.2, scene.duration_s, 12)])


def test_the_background_passes_behind_objects_that_stay() -> None:
    scene = make_scene(5, 60.0, 1)
    renderer = FilmedRenderer(replace(scene, objects=()), HEIGHT, WIDTH, Footage(pan_per_s=0.1))
    first, later = renderer.frame(0.0), renderer.frame(1.0)
    moved = round(0.1 * WIDTH)
    assert np.array_equal(first[:, moved:], later[:, :-moved]) or np.array_equal(
        first[:, :-moved], later[:, moved:]
    )
    assert np.array_equal(renderer.frame(20.0), first), "after two widths it begins again"


def test_the_clock_shows_whole_seconds() -> None:
    renderer = FilmedRenderer(make_scene(5, 60.0, 1), HEIGHT, WIDTH, Footage(has_label=True))
    corner = [renderer.frame(time_s)[:7, :60].tobytes() for time_s in (50.0, 50.9, 51.0)]
    assert corner[0] == corner[1] != corner[2]


@pytest.mark.parametrize(
    "wrong",
    [{"pan_per_s": 2}, {"shake": 0.1}, {"noise": -1}, {"lighting": 1}, {"num_posts": 4}, {"sizes": (0.1, 1)}],
)
def test_footage_that_hides_the_truth_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Footage(**wrong)  # type: ignore[arg-type]


def test_an_unknown_level_is_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError, match=r"'shaky'; allowed: still, handheld, noisy, busy, wild"):
        footage_level("shaky")
    assert footage_level("still") == STILL


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
    truth = write_filmed(tmp_path / "v.mp4", scene, filming, fps=4, height=90, width=160)
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
