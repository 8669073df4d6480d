"""Draws shapes-world videos: which shape of which colour is visible when and where, and its pixels.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epd.errors import RequestError
from epd.types import UInt8Array

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


Floats = NDArray[np.float32]
_SUPERSAMPLING = 4


class SceneRenderer:
    """Draws frames of one scene at one size; holds one background, no frames."""

    def __init__(self, scene: Scene, height: int, width: int) -> None:
        self.scene, self.height, self.width = scene, height, width
        rng = np.random.default_rng(scene.seed)
        self._background = _draw_background(rng, height, width)
        self._sprites = {item.shape: _Sprite(rng, item, height, width) for item in scene.objects}

    def frame(self, time_s: float) -> UInt8Array:
        """Returns the frame at `time_s`: uint8 [H, W, 3], RGB."""
        canvas = self._background.copy()
        self._paint(canvas, time_s)
        return canvas

    def _paint(self, canvas: UInt8Array, time_s: float, shift: tuple[int, int] = (0, 0)) -> None:
        """Paints the objects. shift: of the whole picture, (down, to the right), pixels."""
        down, right = shift
        for item in self.scene.visible(time_s):
            x, y = item.position(time_s)
            centre = round(x * self.width) + right, round(y * self.height) + down
            self._sprites[item.shape].paint(canvas, *centre)


class _Sprite:
    """One object's pixels, drawn once: coverage [S, S, 1] in 0..1 and its colour times coverage [S, S, 3]."""

    def __init__(self, rng: np.random.Generator, item: SceneObject, height: int, width: int) -> None:
        self.radius = max(2, round(item.radius * min(width / NUM_LANES, height)))
        coverage = _coverage(_INSIDE[item.shape], self.radius)[..., None]
        colour = np.asarray(COLOURS[item.colour], np.float32) + rng.uniform(-10, 10, 3)
        shade = np.linspace(1.0, rng.uniform(0.85, 1.0), len(coverage), dtype=np.float32)[:, None, None]
        self._opacity = coverage
        self._light = (np.clip(colour * shade, 0, 255) * coverage).astype(np.float32)

    def paint(self, canvas: UInt8Array, x: int, y: int) -> None:
        """Blends the sprite centred at pixel (x, y) into the canvas, clipped at its edges."""
        height, width = canvas.shape[:2]
        top, left = y - self.radius, x - self.radius
        rows = slice(max(0, top), min(height, y + self.radius))
        columns = slice(max(0, left), min(width, x + self.radius))
        inner = (slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left))
        under = canvas[rows, columns]
        canvas[rows, columns] = (under * (1 - self._opacity[inner]) + self._light[inner]).astype(np.uint8)


def _coverage(inside: Callable[[Floats, Floats], NDArray[np.bool_]], radius: int) -> Floats:
    """Returns the share of each pixel of a 2r x 2r square that is inside the shape: float32 [2r, 2r]."""
    size = 2 * radius * _SUPERSAMPLING
    line = ((np.arange(size, dtype=np.float32) + 0.5) / size) * 2 - 1
    fine = inside(np.asarray(line[None, :], np.float32), np.asarray(line[:, None], np.float32)).astype(
        np.float32
    )
    blocks = fine.reshape(2 * radius, _SUPERSAMPLING, 2 * radius, _SUPERSAMPLING)
    return np.asarray(blocks.mean(axis=(1, 3)), np.float32)


def _inside_star(x: Floats, y: Floats) -> NDArray[np.bool_]:
    angle = np.arctan2(x, -y) % (2 * np.pi / 5)
    angle = np.minimum(angle, 2 * np.pi / 5 - angle)
    inner = 0.42
    # The edge runs from the tip (angle 0, radius 1) to the notch (angle pi/5, radius `inner`).
    tip, notch = np.array([1.0, 0.0]), inner * np.array([np.cos(np.pi / 5), np.sin(np.pi / 5)])
    edge = notch - tip
    distance = np.hypot(x, y)
    along, across = distance * np.cos(angle) - tip[0], distance * np.sin(angle) - tip[1]
    return np.asarray(edge[0] * across - edge[1] * along >= 0)


def _inside_triangle(x: Floats, y: Floats) -> NDArray[np.bool_]:
    return np.asarray((y <= 0.8) & (y >= -0.9 + 1.7 * np.abs(x) / 0.98))


_INSIDE: dict[str, Callable[[Floats, Floats], NDArray[np.bool_]]] = {
    "circle": lambda x, y: np.asarray(x**2 + y**2 <= 0.9**2),
    "square": lambda x, y: np.asarray(np.maximum(np.abs(x), np.abs(y)) <= 0.8),
    "triangle": _inside_triangle,
    "star": _inside_star,
    "cross": lambda x, y: np.asarray(
        (np.minimum(np.abs(x), np.abs(y)) <= 0.3) & (np.maximum(np.abs(x), np.abs(y)) <= 0.95)
    ),
    "ring": lambda x, y: np.asarray((x**2 + y**2 <= 0.95**2) & (x**2 + y**2 >= 0.52**2)),
}


def _draw_background(rng: np.random.Generator, height: int, width: int) -> UInt8Array:
    """Draws muted blotches at two scales plus fine grain: uint8 [H, W, 3], values about 45 to 165."""
    base = rng.uniform(75, 125) + rng.uniform(-12, 12, 3)
    coarse = _smooth_noise(rng, 3, 4, height, width) * 24
    fine = _smooth_noise(rng, 12, 20, height, width) * 9
    grain = rng.normal(0, 2.5, (height, width, 1))
    return np.asarray(np.clip(base + coarse + fine + grain, 0, 255), np.uint8)


def _smooth_noise(rng: np.random.Generator, rows: int, columns: int, height: int, width: int) -> Floats:
    """Returns a coarse random grid, stretched: float32 [H, W, 3], mostly grey, about unit variance."""
    grid = rng.normal(0, 1, (rows + 1, columns + 1, 1)) + rng.normal(0, 0.3, (rows + 1, columns + 1, 3))
    tall = _stretch(grid, height)
    return np.asarray(_stretch(tall.swapaxes(0, 1), width).swapaxes(0, 1), np.float32)


def _stretch(grid: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Interpolates the first axis linearly to `length` samples."""
    position = np.linspace(0, len(grid) - 1, length)
    low = np.minimum(position.astype(int), len(grid) - 2)
    share = (position - low)[:, None, None]
    return np.asarray(grid[low] * (1 - share) + grid[low + 1] * share)
