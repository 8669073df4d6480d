"""Draws questions whose answers describe what happens, and compares descriptions with a scene, fact by fact.

scene  -> sightings (what frames at a given gap show)  -> sentences, JSON      what a model is to answer
answer -> sightings (what it claims)                   -> FactCounts           found, missed, invented
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epd.eval.items import FactCounts
from epd.shapes.questions import Question, QuestionKind, with_article
from epd.shapes.world import COLOURS, SHAPES, Scene, SceneObject

PLACES = ("on the left", "in the middle", "on the right")
MOTIONS = ("moves up", "hardly moves", "moves down")
NEVER = "never"

# An object moves if its centre changes by this share of the frame's height; near it, either is right.
_MOVED = 0.1
_MOVED_MARGIN = 0.05

SCENE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "shapes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "shape": {"enum": list(SHAPES)},
                    "colour": {"enum": list(COLOURS)},
                    "place": {"enum": ["left", "middle", "right"]},
                    "motion": {"enum": ["up", "none", "down"]},
                    "from": {"type": "integer", "minimum": 0},
                    "to": {"type": ["integer", "null"]},
                },
                "required": ["shape", "colour", "place", "motion", "from", "to"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["count", "shapes"],
    "additionalProperties": False,
}
_JSON_PLACES = ("left", "middle", "right")
_JSON_MOTIONS = ("up", "none", "down")


@dataclass(frozen=True, slots=True)
class Sighting:
    """States what is seen of one object.

    place: index into PLACES; motion: index into MOTIONS.
    from_s, to_s: whole seconds; `to_s` None for an object that is there at the end.
    """

    shape: str
    colour: str
    place: int
    motion: int
    from_s: int
    to_s: int | None

    def sentence(self) -> str:
        thing = f"{with_article(self.colour)} {self.shape}".capitalize()
        end = "is there at the end" if self.to_s is None else f"leaves at {self.to_s} s"
        return f"{thing} appears {PLACES[self.place]} at {self.from_s} s, {MOTIONS[self.motion]} and {end}."

    def record(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "colour": self.colour,
            "place": _JSON_PLACES[self.place],
            "motion": _JSON_MOTIONS[self.motion],
            "from": self.from_s,
            "to": self.to_s,
        }


def sightings(scene: Scene, times_s: Sequence[float]) -> list[Sighting]:
    """Returns what frames at `times_s` show, in order of appearance; two neighbouring frames share a time.

    A vision tower takes two frames together. Times are those of the first and the last two that show an
    object, in the whole seconds of the timestamps that Qwen3-VL writes before them, so that an answer may
    copy what the prompt says: `<12.5 seconds>` is 12.
    """
    stamps_s = timestamps_s(times_s)
    seen = []
    for item in scene.objects:
        frames = [index for index, time_s in enumerate(times_s) if item.is_visible(time_s)]
        if frames:
            first, last = frames[0], frames[-1]
            height = item.position(times_s[last])[1] - item.position(times_s[first])[1]
            is_last = last // 2 == len(stamps_s) - 1
            to_s = None if is_last else int(stamps_s[last // 2])
            from_s = int(stamps_s[first // 2])
            seen.append(Sighting(item.shape, item.colour, item.lane, _motion(height), from_s, to_s))
    return seen


def timestamps_s(times_s: Sequence[float]) -> list[float]:
    """Returns the middle of every two frames, in tenths; an odd last frame is taken twice."""
    times = [*times_s, *times_s[len(times_s) // 2 * 2 :]]
    middles = ((first + second) / 2 for first, second in zip(times[::2], times[1::2], strict=True))
    return [float(f"{middle:.1f}") for middle in middles]


def even_times_s(duration_s: float, gap_s: float) -> list[float]:
    """Returns when frames every `gap_s` seconds are seen, at least two."""
    return [index * gap_s for index in range(max(2, round(duration_s / gap_s)))]


def _motion(height: float) -> int:
    return 1 + (height > _MOVED) - (height < -_MOVED)


def description(seen: Sequence[Sighting]) -> str:
    """Returns the answer to "Describe the video."."""
    count = f"There {'is 1 shape' if len(seen) == 1 else f'are {len(seen)} shapes'}."
    return " ".join([count, *(each.sentence() for each in seen)])


def still_description(scene: Scene) -> str:
    """Returns the answer to "Describe the image.". The scene holds what the image shows."""
    things = [f"{with_article(each.colour)} {each.shape} is {PLACES[each.lane]}" for each in scene.objects]
    return " ".join(f"{thing.capitalize()}." for thing in things)


def as_json(seen: Sequence[Sighting]) -> str:
    """Returns the answer to "Describe the video as JSON.", which SCENE_SCHEMA admits."""
    return json.dumps({"count": len(seen), "shapes": [each.record() for each in seen]})


# What an answer claims

_SENTENCE = re.compile(
    rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) appears ({'|'.join(PLACES)}) at (\d+) s, "
    rf"({'|'.join(MOTIONS)}) and (?:leaves at (\d+) s|is there at the end)",
    re.IGNORECASE,
)


def claimed(answer: str) -> list[Sighting]:
    """Returns what a description claims, in sentences or as JSON; nothing for what is neither."""
    if answer.lstrip().startswith("{"):
        return _claimed_by_json(answer)
    return [
        Sighting(
            match[2].lower(),
            match[1].lower(),
            PLACES.index(match[3].lower()),
            MOTIONS.index(match[5].lower()),
            int(match[4]),
            int(match[6]) if match[6] else None,
        )
        for match in _SENTENCE.finditer(answer)
    ]


def _claimed_by_json(answer: str) -> list[Sighting]:
    try:
        return [
            Sighting(
                each["shape"],
                each["colour"],
                _JSON_PLACES.index(each["place"]),
                _JSON_MOTIONS.index(each["motion"]),
                int(each["from"]),
                None if each["to"] is None else int(each["to"]),
            )
            for each in json.loads(answer)["shapes"]
        ]
    except (ValueError, KeyError, TypeError):
        return []


def compare(claims: Sequence[Sighting], scene: Scene, margin_s: float) -> FactCounts:
    """Counts which facts of the scene are claimed.

    margin_s: a time this near is right. An object that is claimed twice counts once; the other is invented.
    """
    counts = FactCounts()
    left = {item.shape: item for item in scene.objects}
    for claim in claims:
        item = left.pop(claim.shape, None)
        right = 0 if item is None else _right_facts(claim, item, scene.duration_s, margin_s)
        counts += FactCounts(right, 0, 6 - right) if item is None else FactCounts(right, 6 - right, 6 - right)
    return counts + FactCounts(missed=6 * len(left))


TOLD_KINDS = (QuestionKind.DESCRIBE, QuestionKind.JSON)


def facts_told(kind: QuestionKind, scene: Scene, margin_s: float, answer: str) -> FactCounts:
    """Counts the facts of a description, or of JSON; an answer that is not of this kind has none.

    margin_s: a time this near is right.
    """
    is_as_asked = answer.lstrip().startswith("{") == (kind is QuestionKind.JSON)
    return compare(claimed(answer) if is_as_asked else (), scene, margin_s)


def _right_facts(claim: Sighting, item: SceneObject, duration_s: float, margin_s: float) -> int:
    height = item.end_xy[1] - item.start_xy[1]
    motions = {_motion(height + shift) for shift in (-_MOVED_MARGIN, 0, _MOVED_MARGIN)}
    to_s = duration_s if claim.to_s is None else claim.to_s
    return 1 + sum(
        (
            claim.colour == item.colour,
            claim.place == item.lane,
            claim.motion in motions,
            abs(claim.from_s - item.start_s) <= margin_s,
            abs(to_s - item.end_s) <= margin_s,
        )
    )


# Questions

_DESCRIBE = (
    "Describe the video.",
    "What happens in the video?",
    "Tell me what happens in the video.",
    "Describe what you see.",
)
_DESCRIBE_STILL = ("Describe the image.", "What is in the image?", "Describe what you see.")
_JSON = (
    "Describe the video as JSON.",
    "List the shapes as JSON.",
    "What happens in the video? Answer as JSON.",
)
_WHEN = (
    "When is the {shape} visible?",
    "When can the {shape} be seen?",
    "From when to when is the {shape} visible?",
)
_APPEARS = ("When does the {shape} appear?", "At what time does the {shape} appear?")
_WHERE = ("Where is the {shape}?", "Where does the {shape} appear?", "On which side is the {shape}?")
_MOTION = ("How does the {shape} move?", "Which way does the {shape} move?")
_VISIBLE = ("How many shapes are visible at {time} seconds?", "How many shapes can be seen at {time} s?")
_APPEARED = (
    "How many shapes have appeared by {time} seconds?",
    "How many shapes appear before {time} seconds?",
)
_FIRST = ("Which shape appears first?", "What is the first shape?", "Which shape comes first?")
_LAST = ("Which shape appears last?", "What is the last shape to appear?", "Which shape comes last?")


def make_stories(
    scene: Scene, rng: random.Random, gap_s: float, num_per_kind: int = 1, *, is_image: bool = False
) -> list[Question]:
    """Draws questions that take more than one word, about what frames every `gap_s` seconds show."""
    if is_image:
        return [Question(QuestionKind.DESCRIBE, rng.choice(_DESCRIBE_STILL), still_description(scene))]
    return stories_at(scene, rng, even_times_s(scene.duration_s, gap_s), num_per_kind)


def stories_at(
    scene: Scene, rng: random.Random, times_s: Sequence[float], num_per_kind: int = 1
) -> list[Question]:
    """Draws questions that take more than one word, about what frames at `times_s` show."""
    gap_s = max(later - earlier for earlier, later in itertools.pairwise(times_s))
    seen = sightings(scene, times_s)
    questions = [
        Question(QuestionKind.DESCRIBE, rng.choice(_DESCRIBE), description(seen)),
        Question(QuestionKind.JSON, rng.choice(_JSON), as_json(seen)),
    ]
    for _ in range(num_per_kind):
        questions += [
            _ask_when(seen, rng, 2 * gap_s),
            _ask_where(seen, rng),
            _ask_motion(seen, rng),
            _ask_follow_up(seen, rng, 2 * gap_s),
        ]
        counted = _ask_count_over_time(scene, rng, 2 * gap_s)
        questions += [counted] if counted else []
    return questions


def _span(each: Sighting) -> str:
    return f"from {each.from_s} s " + ("until the end" if each.to_s is None else f"to {each.to_s} s")


def _ask_when(seen: Sequence[Sighting], rng: random.Random, margin_s: float) -> Question:
    absent = [shape for shape in SHAPES if shape not in {each.shape for each in seen}]
    if absent and rng.random() < 0.15:
        return Question(QuestionKind.WHEN, rng.choice(_WHEN).format(shape=rng.choice(absent)), NEVER)
    each = rng.choice(seen)
    if rng.random() < 0.3:
        text, answer = rng.choice(_APPEARS), f"at {each.from_s} s"
    else:
        text, answer = rng.choice(_WHEN), _span(each)
    return Question(QuestionKind.WHEN, text.format(shape=each.shape), answer, margin=margin_s)


def _ask_where(seen: Sequence[Sighting], rng: random.Random) -> Question:
    each = rng.choice(seen)
    return Question(QuestionKind.WHERE, rng.choice(_WHERE).format(shape=each.shape), PLACES[each.place])


def _ask_motion(seen: Sequence[Sighting], rng: random.Random) -> Question:
    each = rng.choice(seen)
    return Question(QuestionKind.MOTION, rng.choice(_MOTION).format(shape=each.shape), MOTIONS[each.motion])


def _ask_follow_up(seen: Sequence[Sighting], rng: random.Random, margin_s: float) -> Question:
    first = rng.random() < 0.5
    each = seen[0 if first else -1]
    earlier = (rng.choice(_FIRST if first else _LAST), each.shape)
    text, answer, margin = rng.choice(
        (
            ("What colour is it?", each.colour, 0.0),
            ("Where is it?", PLACES[each.place], 0.0),
            ("When is it visible?", _span(each), margin_s),
        )
    )
    return Question(QuestionKind.FOLLOW_UP, text, answer, earlier=(earlier,), margin=margin)


def _ask_count_over_time(scene: Scene, rng: random.Random, margin_s: float) -> Question | None:
    """Asks about a second without a change near it; None when no attempt finds one."""
    for _ in range(20):
        time_s = rng.randint(0, int(scene.duration_s))
        starts = [item.start_s for item in scene.objects]
        changes = starts + [item.end_s for item in scene.objects if item.end_s < scene.duration_s]
        if any(abs(time_s - change) < margin_s for change in changes) or time_s > scene.duration_s - margin_s:
            continue
        if rng.random() < 0.5:
            count, text = len(scene.visible(time_s)), rng.choice(_VISIBLE)
        else:
            count, text = sum(start <= time_s for start in starts), rng.choice(_APPEARED)
        return Question(QuestionKind.COUNT_OVER_TIME, text.format(time=time_s), str(count))
    return None
