"""The shapes world keeps its promises: objects never collide, answers follow from what is on screen.

Modules: `epd/shapes/questions.py`.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.errors import RequestError
from epd.shapes import (
    COLOURS,
    SHAPES,
    Question,
    QuestionKind,
    Scene,
    SceneRenderer,
    make_questions,
    make_scene,
)
from epd.shapes.questions import ONE_WORD_KINDS
from epd.shapes.world import max_objects

seeds = st.integers(0, 2**31)
durations_s = st.floats(1, 7200)


@given(seeds, durations_s)
def test_objects_are_distinct_ordered_and_inside_the_video(seed: int, duration_s: float) -> None:
    objects = make_scene(seed, duration_s).objects
    assert 1 <= len(objects) <= max_objects(duration_s)
    assert len({item.shape for item in objects}) == len({item.colour for item in objects}) == len(objects)
    assert all(0 <= item.start_s < item.end_s <= duration_s for item in objects)
    assert all(after.start_s - before.start_s >= 2 - 1e-9 for before, after in itertools.pairwise(objects)), (
        "objects that appear together cannot be put in order"
    )


@given(seeds, durations_s)
def test_a_lane_shows_one_object_at_a_time(seed: int, duration_s: float) -> None:
    objects = make_scene(seed, duration_s).objects
    for one, other in itertools.combinations(objects, 2):
        apart = one.end_s <= other.start_s or other.end_s <= one.start_s
        assert apart or one.lane != other.lane


@given(seeds, durations_s)
def test_the_same_seed_gives_the_same_scene(seed: int, duration_s: float) -> None:
    assert make_scene(seed, duration_s) == make_scene(seed, duration_s)


@pytest.mark.parametrize(
    ("duration_s", "num_objects"),
    [(0.0, None), (-1.0, None), (float("nan"), None), (1e9, None), (8.0, 3), (60.0, 7), (60.0, 0)],
)
def test_impossible_scenes_are_refused(duration_s: float, num_objects: int | None) -> None:
    with pytest.raises(RequestError, match=r"ask for"):
        make_scene(0, duration_s, num_objects)


def _seen(scene: Scene) -> dict[str, tuple[float, float]]:
    """First and last time each shape is on screen, found by looking every tenth of a second."""
    times: dict[str, list[float]] = {}
    for time_s in np.arange(0, scene.duration_s, 0.1):
        for item in scene.visible(float(time_s)):
            times.setdefault(item.shape, []).append(float(time_s))
    return {shape: (min(seen), max(seen)) for shape, seen in times.items()}


def answer_by_looking(scene: Scene, question: Question) -> str:
    """The answer from what is visible when and the words of the question, not from how it was made."""
    order = sorted(_seen(scene), key=lambda shape: _seen(scene)[shape][0])
    colour_of = {item.shape: item.colour for item in scene.objects}
    words = question.text.rstrip("?.").lower().split()
    shapes = [word for word in words if word in SHAPES]
    colours = [word for word in words if word in COLOURS]
    match question.kind:
        case QuestionKind.COLOUR:
            return colour_of[shapes[0]]
        case QuestionKind.PRESENCE:
            pairs = [(s, c) for s, c in colour_of.items() if shapes in ([], [s]) and colours in ([], [c])]
            return "yes" if pairs else "no"
        case QuestionKind.ORDER:
            return order[0] if "first" in words else order[-1]
        case QuestionKind.COUNT:
            return str(len(order))
        case QuestionKind.AFTER:
            return [*order, "nothing"][order.index(shapes[0]) + 1]
        case QuestionKind.TIME:
            time_s = float(next(word for word in words if word.isdigit()))
            visible = [item.shape for item in scene.visible(time_s)]
            return visible[0] if visible else "nothing"


@given(seeds, st.floats(4, 120))
@settings(max_examples=60, deadline=None)
def test_answers_equal_what_looking_at_every_moment_finds(seed: int, duration_s: float) -> None:
    scene = make_scene(seed, duration_s)
    for question in make_questions(scene, random.Random(seed), num_per_kind=2):
        assert question.answer == answer_by_looking(scene, question), question.text


def test_every_kind_is_asked_and_both_yes_and_no_occur() -> None:
    rng = random.Random(0)
    asked = [q for seed in range(40) for q in make_questions(make_scene(seed, 60.0), rng)]
    assert {question.kind for question in asked} == set(ONE_WORD_KINDS)
    presence = [question.answer for question in asked if question.kind is QuestionKind.PRESENCE]
    assert 0.3 < presence.count("yes") / len(presence) < 0.7


@pytest.mark.parametrize(
    ("given", "right"), [("red", True), (" Red.\n", True), ("red circle", False), ("", False)]
)
def test_an_answer_is_judged_by_its_word_not_by_its_dress(given: str, right: bool) -> None:
    assert Question(QuestionKind.COLOUR, "What colour is the circle?", "red").is_answered_by(given) is right


def test_the_drawn_frame_shows_each_object_in_its_colour_where_the_scene_says() -> None:
    scene = make_scene(2, 60.0, 6)
    renderer = SceneRenderer(scene, 180, 320)
    for time_s in (1.0, 20.0, 40.0, 59.0):
        frame = renderer.frame(time_s)
        for item in (item for item in scene.visible(time_s) if item.shape != "ring"):
            x, y = item.position(time_s)
            pixel = frame[round(y * 180), round(x * 320)].astype(int)
            assert np.abs(pixel - np.array(COLOURS[item.colour])).max() <= 40, item


def test_background_is_static_and_muted() -> None:
    renderer = SceneRenderer(make_scene(5, 60.0, 1), 90, 160)
    first, later = renderer.frame(0.0).astype(int), renderer.frame(30.0).astype(int)
    same = (first == later).all(axis=-1)
    assert same.mean() > 0.7
    assert (first[same].max(axis=-1) - first[same].min(axis=-1)).mean() < 60
