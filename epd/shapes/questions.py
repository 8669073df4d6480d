"""Draws questions about a scene, with answers that follow from its truth."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from enum import StrEnum

from epd.shapes.world import COLOURS, SHAPES, Scene


class QuestionKind(StrEnum):
    """What a question is about; accuracy is reported by kind."""

    COLOUR = "colour"
    PRESENCE = "presence"
    ORDER = "order"
    COUNT = "count"
    TIME = "time"
    AFTER = "after"
    DESCRIBE = "describe"
    JSON = "json"
    WHEN = "when"
    WHERE = "where"
    MOTION = "motion"
    COUNT_OVER_TIME = "count over time"
    FOLLOW_UP = "follow-up"
    CLIPS = "clips"


# Those that one word answers.
ONE_WORD_KINDS = tuple(QuestionKind)[:6]


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its right answer.

    earlier: questions and answers of the dialogue before it.
    margin: numbers of an answer may differ by this, seconds.
    """

    kind: QuestionKind
    text: str
    answer: str
    earlier: tuple[tuple[str, str], ...] = ()
    margin: float = 0.0

    def is_answered_by(self, answer: str) -> bool:
        """Returns True for the right answer, whatever its case, surrounding space or final full stop."""
        given, right = _plain(answer), _plain(self.answer)
        if given == right or not self.margin:
            return given == right
        return _NUMBER.sub("#", given) == _NUMBER.sub("#", right) and all(
            abs(int(one) - int(other)) <= self.margin
            for one, other in zip(_NUMBER.findall(given), _NUMBER.findall(right), strict=True)
        )


_NUMBER = re.compile(r"\d{1,9}")


def _plain(answer: str) -> str:
    return answer.strip().rstrip(".").lower()


NOTHING = "nothing"

_COLOUR = (
    "What colour is the {shape}?",
    "What color is the {shape}?",
    "Which colour does the {shape} have?",
    "Tell me the colour of the {shape}.",
)
_PRESENCE = (
    "Is there {thing}?",
    "Does {thing} appear?",
    "Can you see {thing}?",
    "Do you see {thing} in the video?",
)
_FIRST = ("Which shape appears first?", "What is the first shape?", "Which shape comes first?")
_LAST = ("Which shape appears last?", "What is the last shape to appear?", "Which shape comes last?")
_COUNT = (
    "How many shapes are there?",
    "How many shapes appear in the video?",
    "How many different shapes can you see?",
    "Count the shapes.",
)
_TIME = (
    "What shape is visible at {time} seconds?",
    "Which shape can be seen at {time} seconds?",
    "Which shape is on screen at {time} s?",
    "What is visible at t = {time} s?",
)
_AFTER = (
    "Which shape appears after the {shape}?",
    "What came after the {shape}?",
    "Which shape is next after the {shape}?",
    "What comes after the {shape}?",
)


def make_questions(
    scene: Scene, rng: random.Random, num_per_kind: int = 1, time_margin_s: float = 1.0
) -> list[Question]:
    """Draws `num_per_kind` questions of every kind that the scene allows, in random order.

    `time_margin_s`: a time in a question is at least this far from any appearance or disappearance, so that a
    video sampled at that gap shows the truth.
    """
    questions: list[Question] = []
    for _ in range(num_per_kind):
        questions += [
            make(scene, rng) for make in (_ask_colour, _ask_presence, _ask_order, _ask_count, _ask_after)
        ]
        at_time = _ask_time(scene, rng, time_margin_s)
        questions += [at_time] if at_time else []
    rng.shuffle(questions)
    return questions


def _ask_colour(scene: Scene, rng: random.Random) -> Question:
    item = rng.choice(scene.objects)
    return Question(QuestionKind.COLOUR, rng.choice(_COLOUR).format(shape=item.shape), item.colour)


def _ask_presence(scene: Scene, rng: random.Random) -> Question:
    wanted = rng.random() < 0.5
    thing = rng.choice((_shape_only, _colour_only, _coloured_shape, _coloured_shape))(scene, rng, wanted)
    answer = "yes" if wanted else "no"
    return Question(QuestionKind.PRESENCE, rng.choice(_PRESENCE).format(thing=thing), answer)


def with_article(noun: str) -> str:
    """Returns the noun behind \"a\" or \"an\"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _shape_only(scene: Scene, rng: random.Random, present: bool) -> str:
    shown = [item.shape for item in scene.objects]
    absent = [shape for shape in SHAPES if shape not in shown]
    if not present and not absent:
        return _coloured_shape(scene, rng, present)
    return with_article(rng.choice(shown if present else absent))


def _colour_only(scene: Scene, rng: random.Random, present: bool) -> str:
    shown = [item.colour for item in scene.objects]
    return f"something {rng.choice(shown if present else [c for c in COLOURS if c not in shown])}"


def _coloured_shape(scene: Scene, rng: random.Random, present: bool) -> str:
    """Returns a true pair, or one with only one part wrong: colour and shape exist, the pair does not."""
    item = rng.choice(scene.objects)
    if present:
        return with_article(f"{item.colour} {item.shape}")
    if rng.random() < 0.5:
        return with_article(f"{rng.choice([c for c in COLOURS if c != item.colour])} {item.shape}")
    return with_article(f"{item.colour} {rng.choice([s for s in SHAPES if s != item.shape])}")


def _ask_order(scene: Scene, rng: random.Random) -> Question:
    first = rng.random() < 0.5
    item = scene.objects[0 if first else -1]
    return Question(QuestionKind.ORDER, rng.choice(_FIRST if first else _LAST), item.shape)


def _ask_count(scene: Scene, rng: random.Random) -> Question:
    return Question(QuestionKind.COUNT, rng.choice(_COUNT), str(len(scene.objects)))


def _ask_after(scene: Scene, rng: random.Random) -> Question:
    index = rng.randrange(len(scene.objects))
    followers = scene.objects[index + 1 : index + 2]
    text = rng.choice(_AFTER).format(shape=scene.objects[index].shape)
    return Question(QuestionKind.AFTER, text, followers[0].shape if followers else NOTHING)


def _ask_time(scene: Scene, rng: random.Random, margin_s: float) -> Question | None:
    """Asks about a whole second with one object, or none; None when no attempt finds one."""
    for _ in range(20):
        time_s = rng.randint(0, int(scene.duration_s))
        answer = _visible_throughout(scene, time_s - margin_s, time_s + margin_s)
        if answer is None or (answer == NOTHING and rng.random() < 0.7):
            continue
        return Question(QuestionKind.TIME, rng.choice(_TIME).format(time=time_s), answer)
    return None


def _visible_throughout(scene: Scene, start_s: float, end_s: float) -> str | None:
    """Returns the one shape visible during all of [start_s, end_s], NOTHING for none, None if it changes."""
    if start_s < 0 or end_s > scene.duration_s:
        return None
    touched = [item for item in scene.objects if item.start_s < end_s and start_s < item.end_s]
    if not touched:
        return NOTHING
    item = touched[0]
    alone = len(touched) == 1 and item.start_s <= start_s and end_s <= item.end_s
    return item.shape if alone else None
