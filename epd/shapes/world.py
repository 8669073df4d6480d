"""Draws what happens in a shapes-world video: which shape of which colour is visible when, and where.

The frame has three lanes side by side; a lane shows one object at a time, so objects never overlap. Each
object appears once, drifts along its lane and vanishes. Shapes and colours are unique within a scene, so that
"the circle" is never ambiguous. Events scale with the length of the video: an hour has as many objects as a
minute.

    lane 0  |      [ red circle )                    |
    lane 1  |  [ blue star        )      [ white ring )
    lane 2  |             [ green cross )            |   time, half-open intervals
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from epd.errors import RequestError

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 34, 34),
    "orange": (245, 140, 20),
    "yellow": (240, 225, 40),
    "green": (40, 165, 50),
    "cyan": (60, 215, 225),
    "blue": (35, 65, 215),
    "purple": (150, 45, 190),
    "white": (248, 248, 248),
}
NUM_LANES = 3
MAX_OBJECTS = len(SHAPES)

_MIN_VISIBLE_S = 3.0
_MIN_START_GAP_S = 2.0
_SECONDS_PER_OBJECT = 4.0
_MAX_DURATION_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One object: visible in [start_s, end_s), moving linearly from start_xy to end_xy.

    Positions are centres as fractions of the frame's width and height. The radius is a fraction of the
    smaller of lane width and frame height.
    """

    shape: str
    colour: str
    start_s: float
    end_s: float
    lane: int
    start_xy: tuple[float, float]
    end_xy: tuple[float, float]
    radius: float

    def is_visible(self, time_s: float) -> bool:
        return self.start_s <= time_s < self.end_s

    def position(self, time_s: float) -> tuple[float, float]:
        """Returns the centre at `time_s` as fractions of the frame."""
        share = (time_s - self.start_s) / (self.end_s - self.start_s)
        (x0, y0), (x1, y1) = self.start_xy, self.end_xy
        return x0 + (x1 - x0) * share, y0 + (y1 - y0) * share


@dataclass(frozen=True, slots=True)
class Scene:
    """A whole video's truth; `objects` are ordered by the time they appear."""

    seed: int
    duration_s: float
    objects: tuple[SceneObject, ...]

    def visible(self, time_s: float) -> list[SceneObject]:
        return [item for item in self.objects if item.is_visible(time_s)]

    def truth(self) -> dict[str, Any]:
        """Returns the scene as plain JSON values: what is written beside a demo video."""
        return asdict(self)


def max_objects(duration_s: float) -> int:
    """Returns how many objects a video of this length can hold so that each is seen apart from the next."""
    return max(1, min(MAX_OBJECTS, int(duration_s / _SECONDS_PER_OBJECT)))


def make_scene(seed: int, duration_s: float, num_objects: int | None = None) -> Scene:
    """Draws a scene. The same arguments always give the same scene.

    Raises RequestError for a duration that is not positive or more objects than it can hold.
    """
    if not 0 < duration_s <= _MAX_DURATION_S:
        raise RequestError(
            f"a video of {duration_s} s cannot be drawn; ask for up to {_MAX_DURATION_S:.0f} s"
        )
    limit = max_objects(duration_s)
    if num_objects is not None and not 1 <= num_objects <= limit:
        raise RequestError(f"{num_objects} objects do not fit into {duration_s} s; ask for 1 to {limit}")
    rng = random.Random(seed)
    count = num_objects or rng.randint(1, limit)
    shapes = rng.sample(SHAPES, count)
    colours = rng.sample(list(COLOURS), count)
    objects: list[SceneObject] = []
    for shape, colour, start_s in zip(shapes, colours, _start_times(rng, duration_s, count), strict=True):
        lane, objects = _free_lane(rng, objects, start_s, duration_s)
        objects.append(_make_object(rng, shape, colour, start_s, duration_s, lane))
    return Scene(seed, duration_s, tuple(objects))


def _start_gap_s(duration_s: float) -> float:
    return max(_MIN_START_GAP_S, 0.08 * duration_s)


def _start_times(rng: random.Random, duration_s: float, count: int) -> list[float]:
    """Returns increasing times, at least one gap apart, the last early enough for its object to be seen."""
    gap_s = _start_gap_s(duration_s)
    room_s = max(0.0, duration_s - max(_MIN_VISIBLE_S, 0.1 * duration_s) - gap_s * (count - 1))
    starts = sorted(rng.uniform(0, room_s) for _ in range(count))
    if rng.random() < 0.5:
        starts[0] = 0.0
    return [start + gap_s * index for index, start in enumerate(starts)]


def _free_lane(
    rng: random.Random, objects: list[SceneObject], start_s: float, duration_s: float
) -> tuple[int, list[SceneObject]]:
    """Returns a lane that is empty at `start_s`; if all are taken, the oldest object leaves earlier."""
    clear_s = start_s - max(1.0, 0.03 * duration_s)
    taken = [item for item in objects if item.end_s > clear_s]
    free = sorted(set(range(NUM_LANES)) - {item.lane for item in taken})
    if free:
        return rng.choice(free), objects
    leaving = taken[0]
    shortened = _with_end(leaving, clear_s)
    return leaving.lane, [shortened if item is leaving else item for item in objects]


def _with_end(item: SceneObject, end_s: float) -> SceneObject:
    x, y = item.position(end_s)
    return SceneObject(
        item.shape, item.colour, item.start_s, end_s, item.lane, item.start_xy, (x, y), item.radius
    )


def _make_object(
    rng: random.Random, shape: str, colour: str, start_s: float, duration_s: float, lane: int
) -> SceneObject:
    shortest_s = max(_MIN_VISIBLE_S, 0.1 * duration_s)
    longest_s = max(_MIN_VISIBLE_S + 0.5, 0.35 * duration_s)
    end_s = min(duration_s, start_s + rng.uniform(shortest_s, longest_s))
    centre = (lane + 0.5) / NUM_LANES
    start_xy, end_xy = ((centre + rng.uniform(-0.02, 0.02), rng.uniform(0.3, 0.7)) for _ in range(2))
    return SceneObject(shape, colour, start_s, end_s, lane, start_xy, end_xy, rng.uniform(0.38, 0.45))
