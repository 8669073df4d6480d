"""Descriptions of a scene are parsed back and counted fact by fact; questions have one right answer."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.shapes import Question, QuestionKind, Scene, SceneObject, make_scene
from training.stories import (
    NEVER,
    SCENE_SCHEMA,
    FactCounts,
    as_json,
    claimed,
    compare,
    description,
    even_times_s,
    make_stories,
    sightings,
    still_description,
    timestamps_s,
)

RED_CIRCLE = SceneObject("circle", "red", 4.2, 11.0, 0, (0.2, 0.3), (0.2, 0.6), 0.4)
BLUE_STAR = SceneObject("star", "blue", 8.0, 20.0, 2, (0.8, 0.5), (0.8, 0.5), 0.4)
SCENE = Scene(0, 20.0, (RED_CIRCLE, BLUE_STAR))
STORY = (
    "There are 2 shapes. A red circle appears on the left at 4 s, moves down and leaves at 10 s. "
    "A blue star appears on the right at 8 s, hardly moves and is there at the end."
)


def test_a_description_says_what_pairs_of_frames_show() -> None:
    assert description(sightings(SCENE, even_times_s(20.0, 1.0))) == STORY
    assert still_description(SCENE) == "A red circle is on the left. A blue star is on the right."


def test_times_are_those_that_qwen3_vl_writes_before_the_frames() -> None:
    assert timestamps_s([0.0, 1.0, 2.0, 3.0, 4.0]) == [0.5, 2.5, 4.0]
    late = SceneObject("ring", "red", 11.0, 14.0, 0, (0.2, 0.3), (0.2, 0.6), 0.4)
    (seen,) = sightings(Scene(0, 20.0, (late,)), [10.0, 11.93, 13.0, 13.9, 14.5, 19.0])
    assert (seen.from_s, seen.to_s) == (11, 13)  # <11.0 seconds>, rounded, and <13.4 seconds>


@given(st.integers(0, 2**31), st.sampled_from([8.0, 32.0, 128.0]))
def test_descriptions_and_json_are_parsed_back(seed: int, duration_s: float) -> None:
    seen = sightings(make_scene(seed, duration_s), even_times_s(duration_s, 1.0))
    assert claimed(description(seen)) == claimed(as_json(seen)) == seen
    jsonschema.validate(json.loads(as_json(seen)), SCENE_SCHEMA)


@given(st.integers(0, 2**31), st.sampled_from([8.0, 32.0, 128.0, 512.0]))
def test_the_right_description_has_all_facts(seed: int, duration_s: float) -> None:
    scene = make_scene(seed, duration_s)
    counts = compare(sightings(scene, even_times_s(duration_s, 1.0)), scene, margin_s=2.0)
    assert counts.found == 6 * len(scene.objects) - counts.missed
    assert counts.missed <= 1  # a motion that only the instants between the frames show


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (STORY, FactCounts(12, 0, 0)),
        (STORY.replace("red", "green"), FactCounts(11, 1, 1)),
        (STORY.replace("at 4 s", "at 7 s"), FactCounts(11, 1, 1)),
        (STORY.replace("moves down", "moves up"), FactCounts(11, 1, 1)),
        (STORY.replace("on the left", "in the middle"), FactCounts(11, 1, 1)),
        (STORY.replace("leaves at 10 s", "is there at the end"), FactCounts(11, 1, 1)),
        (STORY.replace("star", "ring"), FactCounts(6, 6, 6)),
        (STORY.replace("star", "circle"), FactCounts(6, 6, 6)),
        ("There is nothing.", FactCounts(0, 12, 0)),
        ('{"count": 2, "shapes": [{"shape": ', FactCounts(0, 12, 0)),
        ('{"shapes": [3]}', FactCounts(0, 12, 0)),
        ('{"shapes": 3}', FactCounts(0, 12, 0)),
    ],
)
def test_wrong_facts_are_missed_and_invented(answer: str, expected: FactCounts) -> None:
    assert compare(claimed(answer), SCENE, margin_s=2.0) == expected


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    precision, recall = 6 / 8, 6 / 12
    assert FactCounts(6, 6, 2).f1 == pytest.approx(2 * precision * recall / (precision + recall))


@given(st.integers(0, 2**31), st.sampled_from([8.0, 64.0]))
def test_every_answer_is_true_of_the_scene(seed: int, duration_s: float) -> None:
    scene = make_scene(seed, duration_s)
    by_shape = {item.shape: item for item in scene.objects}
    for question in make_stories(scene, random.Random(seed), 1.0, num_per_kind=3):
        assert question.is_answered_by(question.answer.upper() + " ")
        shape = next((shape for shape in by_shape if shape in question.text), None)
        match question.kind:
            case QuestionKind.WHEN if question.answer != NEVER:
                assert shape is not None
                start_s = int(next(word for word in question.answer.split() if word.isdigit()))
                assert abs(start_s - by_shape[shape].start_s) <= 2
            case QuestionKind.WHEN:
                assert shape is None
            case QuestionKind.WHERE:
                assert shape is not None
                assert question.answer.split()[-1] == ("left", "middle", "right")[by_shape[shape].lane]
            case QuestionKind.COUNT_OVER_TIME if "appear" not in question.text:
                time_s = int(next(word for word in question.text.split() if word.isdigit()))
                assert question.answer == str(len(scene.visible(time_s)))
            case QuestionKind.FOLLOW_UP:
                ((text, shape),) = question.earlier
                wanted = scene.objects[0 if "first" in text else -1]
                assert shape == wanted.shape


def test_times_may_be_off_by_the_margin_and_words_may_not() -> None:
    question = Question(QuestionKind.WHEN, "When is the ring visible?", "from 4 s to 12 s", margin=2.0)
    assert question.is_answered_by("From 6 s to 10 s.")
    assert not question.is_answered_by("from 7 s to 12 s")
    assert not question.is_answered_by("from 4 s until the end")
    assert not question.is_answered_by("at 4 s")
    assert not replace(question, margin=0.0).is_answered_by("from 6 s to 12 s")
