"""How questions are put, how answers are judged, and which videos a seed draws.

Modules: `epd/eval/plan.py`.
"""

from __future__ import annotations

import pytest

from epd.errors import RequestError
from epd.eval import plan
from epd.eval.items import EvalItem, chosen_letter
from epd.eval.plan import demo_cases
from epd.shapes import Scene
from training.clips import HELD_OUT_SEED

OPTIONS = ("A red car", "A blue car", "Nothing", "Two cars")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" B.", "B"),
        ("(C)", "C"),
        ("D) Two cars", "D"),
        ("B. A blue car", "B"),
        ("C: Nothing", "C"),
        ("The answer is B", "B"),
        ("The best answer is: (D) because A is wrong", "D"),
        ("Option c", "C"),
        ("nothing.", "C"),
        ("a red car", "A"),
        ("It must be D, I think", "D"),
        ("E", None),
        ("either B or D", None),
        ("A cat", "A"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_option_that_an_answer_means(text: str, letter: str | None) -> None:
    assert chosen_letter(text, OPTIONS) == letter


def test_a_multiple_choice_question_is_asked_and_judged_by_letters() -> None:
    item = EvalItem("1", "What is shown?", "B", OPTIONS[:3])
    lines = item.prompt.splitlines()
    assert lines[0].endswith("Respond with only the letter (A, B, or C) of the correct option.")
    assert lines[1:] == [
        "What is shown?",
        "A. A red car",
        "B. A blue car",
        "C. Nothing",
        "The best answer is:",
    ]
    assert item.is_answered_by("B. A blue car")
    assert not item.is_answered_by("A")
    assert not item.is_answered_by("blue")


def test_an_open_question_is_judged_by_its_words() -> None:
    item = EvalItem("1", "Which shape?", "Star")
    assert item.prompt == "Which shape?"
    assert item.is_answered_by(" star.")
    assert not item.is_answered_by("starfish")


def test_a_letter_that_is_no_option_cannot_be_right() -> None:
    with pytest.raises(ValueError, match="letter of 2 options"):
        EvalItem("1", "Which?", "C", ("x", "y"))


def test_a_demo_has_exactly_as_many_questions_as_asked_for_at_each_number_of_frames() -> None:
    cases = demo_cases(17, [8, 32], seed=3)
    for num_frames in (8, 32):
        mine = [case for case in cases if case.num_frames == num_frames]
        assert sum(len(case.video.items) for case in mine) == 17
        assert len(mine) in (3, 4)
        scenes = [case.video.source for case in mine]
        assert all(isinstance(scene, Scene) and scene.duration_s == num_frames for scene in scenes)
    ids = [item.item_id for case in cases for item in case.video.items]
    assert len(set(ids)) == len(ids)
    kinds = {item.kind for case in cases for item in case.video.items}
    assert kinds >= {"colour", "presence", "order", "count", "after"}


def test_more_questions_of_a_kind_need_fewer_videos_and_repeat_none() -> None:
    cases = demo_cases(60, [32], seed=0, num_per_kind=3)
    assert len(cases) < len(demo_cases(60, [32], seed=0)) / 2
    assert sum(len(case.video.items) for case in cases) == 60
    for case in cases:
        questions = [item.question for item in case.video.items]
        assert len(set(questions)) == len(questions)


def test_the_same_seed_draws_the_same_demo_and_more_questions_only_add_to_it() -> None:
    few, many, other = demo_cases(12, [8], 1), demo_cases(30, [8], 1), demo_cases(12, [8], 2)
    assert few == demo_cases(12, [8], 1)
    assert [case.video.name for case in few] == [case.video.name for case in many[: len(few)]]
    assert few[0] == many[0]
    assert {case.video.name for case in few}.isdisjoint(case.video.name for case in other)


def test_demo_scenes_are_never_those_of_training_or_the_model_card() -> None:
    assert plan.HELD_OUT_SEED == HELD_OUT_SEED
    scenes = [case.video.source for case in demo_cases(5, [2, 9999], seed=0)]
    assert all(isinstance(each, Scene) and each.seed >= HELD_OUT_SEED + 10**9 for each in scenes)


def test_with_a_length_all_numbers_of_frames_see_the_same_videos() -> None:
    cases = demo_cases(6, [8, 32], seed=0, duration_s=64.0)
    videos = {n: [case.video for case in cases if case.num_frames == n] for n in (8, 32)}
    assert videos[8] == videos[32]
    assert all(isinstance(v.source, Scene) and v.source.duration_s == 64.0 for v in videos[8])


@pytest.mark.parametrize(
    ("num_questions", "seed", "duration_s", "words"),
    [(0, 0, None, "--demo is 0"), (5, -1, None, "--seed -1"), (5, 0, 1.0, "1 s cannot be drawn")],
)
def test_a_demo_that_makes_no_sense_is_refused(
    num_questions: int, seed: int, duration_s: float | None, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        demo_cases(num_questions, [8], seed, duration_s)
