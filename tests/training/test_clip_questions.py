"""Questions about two videos have one right answer."""

from __future__ import annotations

import random
from dataclasses import replace

from epd.shapes import Scene
from tests.training.test_stories import BLUE_STAR, SCENE
from training.clip_questions import CLIP_ANSWERS, ask_which_clip


def test_two_videos_are_compared() -> None:
    other = Scene(1, 20.0, (replace(BLUE_STAR, colour="green"),))
    answers = {ask_which_clip(SCENE, other, random.Random(seed)) for seed in range(200)}
    assert {question.answer for question in answers} == set(CLIP_ANSWERS)
    truth = {"a circle": "the first", "a star": "both", "a ring": "neither", "a green star": "the second"}
    for question in answers:
        for thing, answer in truth.items():
            if question.text.removesuffix("?").endswith(f" {thing}"):
                assert question.answer == answer
