"""Asks which of two videos shows an object."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from epd.shapes import COLOURS, SHAPES, Question, QuestionKind, Scene
from epd.shapes.questions import with_article

_WHICH_CLIP = (
    "Which of the two videos shows {thing}?",
    "In which video is {thing}?",
    "Which video has {thing}?",
)
CLIP_ANSWERS = ("the first", "the second", "both", "neither")


def ask_which_clip(first: Scene, second: Scene, rng: random.Random) -> Question:
    """Asks which of two videos shows an object: the first, the second, both or neither."""
    shown = [{(item.colour, item.shape) for item in scene.objects} for scene in (first, second)]
    shapes = [{shape for _, shape in pairs} for pairs in shown]
    wanted = rng.randrange(4)
    by_shape = [shape for shape in SHAPES if _holder(shape, shapes) == wanted]
    pairs = [(c, s) for c in COLOURS for s in SHAPES if _holder((c, s), shown) == wanted]
    near = [pair for pair in pairs if pair[1] in shapes[0] | shapes[1]]
    if by_shape and (rng.random() < 0.6 or not pairs):
        thing, answer = with_article(rng.choice(by_shape)), wanted
    elif pairs:
        colour, shape = rng.choice(near or pairs)
        thing, answer = f"{with_article(colour)} {shape}", wanted
    else:
        shape = rng.choice(SHAPES)
        thing, answer = with_article(shape), _holder(shape, shapes)
    return Question(QuestionKind.CLIPS, rng.choice(_WHICH_CLIP).format(thing=thing), CLIP_ANSWERS[answer])


def _holder(thing: Any, shown: Sequence[set[Any]]) -> int:
    first, second = (thing in each for each in shown)
    return 2 if first and second else 0 if first else 1 if second else 3
