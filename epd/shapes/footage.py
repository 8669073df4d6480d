"""Draws scenes as they are filmed: how the camera moves, light and noise, and what stands before the objects.

An object's truth does not depend on it: the picture shifts by a few pixels only, and a post before an object
hides a part of it, so that looking at each frame finds the same objects at the same times.

    background, shifted | objects | posts | light, noise | label        drawn in this order

Shapes: H frame height, W frame width in pixels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from epd.errors import RequestError
from epd.shapes.world import COLOURS, NUM_LANES, Scene, SceneObject
from epd.types import UInt8Array

# Of the least size of objects, in the unit of their radius: a post hides at most half of an object.
_POST_WIDTH = 0.22
_MAX_POSTS = 3
_SHAKE_PERIODS_S = (1.7, 0.6)
_LIGHT_PERIODS_S = (23.0, 5.0)
_STREAM = 0xF007  # keeps these random numbers apart from those of the picture
Floats = NDArray[np.float32]
_SUPERSAMPLING = 4


@dataclass(frozen=True, slots=True)
class Footage:
    """Sets how a scene is filmed; by default the camera stands still and nothing disturbs the picture.

    pan_per_s: how fast the background passes, in widths of the frame per second.
    shake: the farthest that the whole picture shifts, as a share of the frame's width.
    noise: standard deviation of a pixel's brightness, of 255.
    lighting: the most that brightness changes with time, as a share.
    num_posts: posts that pass before the objects, 0 to 3.
    sizes: least and most of the objects' sizes, as shares of those in the scene.
    has_label: whether the camera's name and a clock are burned in.
    """

    pan_per_s: float = 0.0
    shake: float = 0.0
    noise: float = 0.0
    lighting: float = 0.0
    num_posts: int = 0
    sizes: tuple[float, float] = (1.0, 1.0)
    has_label: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError for settings under which looking may not find the truth."""
        low, high = self.sizes
        allowed = {
            "pan_per_s": 0 <= self.pan_per_s <= 1,
            "shake": 0 <= self.shake <= 0.02,
            "noise": 0 <= self.noise <= 40,
            "lighting": 0 <= self.lighting <= 0.4,
            "num_posts": 0 <= self.num_posts <= _MAX_POSTS,
            "sizes": 0.3 <= low <= high <= 1,
        }
        wrong = [f"{name}={getattr(self, name)}" for name, is_allowed in allowed.items() if not is_allowed]
        if wrong:
            raise RequestError(
                f"received {', '.join(wrong)}; allowed: pan_per_s 0 to 1, shake to 0.02, noise to 40, "
                f"lighting to 0.4, num_posts to {_MAX_POSTS}, sizes 0.3 to 1; change them"
            )


STILL = Footage()
LEVELS: Mapping[str, Footage] = {
    "still": STILL,
    "handheld": Footage(pan_per_s=0.02, shake=0.01),
    "noisy": Footage(noise=10.0, lighting=0.2),
    "busy": Footage(num_posts=2, sizes=(0.5, 1.0), has_label=True),
    "wild": Footage(0.02, 0.01, 10.0, 0.2, 2, (0.5, 1.0), has_label=True),
}


def footage_level(name: str) -> Footage:
    """Returns the settings of a level. Raises RequestError for a name that is none."""
    if name not in LEVELS:
        raise RequestError(f"received the footage {name!r}; allowed: {', '.join(LEVELS)}; choose one")
    return LEVELS[name]


def resized(scene: Scene, footage: Footage) -> Scene:
    """Returns the scene with objects of the footage's sizes."""
    if footage.sizes == STILL.sizes:
        return scene
    rng = random.Random(f"sizes {scene.seed}")
    objects = (replace(item, radius=item.radius * rng.uniform(*footage.sizes)) for item in scene.objects)
    return replace(scene, objects=tuple(objects))


class Camera:
    """Films one scene: the same seed, footage and time always give the same picture."""

    def __init__(self, footage: Footage, seed: int, height: int, width: int) -> None:
        self.footage, self._seed = footage, seed
        self._height, self._width = height, width
        rng = np.random.default_rng([_STREAM, seed])
        self._phases = rng.uniform(0, 2 * math.pi, 6)
        self._pan_per_s = footage.pan_per_s * rng.choice([-1, 1])
        self._post_speed = rng.uniform(0.05, 0.15) * rng.choice([-1, 1])
        self._post_start = rng.uniform(0, 1)
        self._post_colour = (rng.uniform(50, 150) + rng.uniform(-12, 12, 3)).astype(np.uint8)
        self._number = int(rng.integers(1, 10))

    def shift(self, time_s: float) -> tuple[int, int]:
        """Returns how far the picture is shifted (down, to the right), pixels."""
        if not self.footage.shake:
            return 0, 0
        reach = self.footage.shake * self._width
        down, right = (_wave(time_s, _SHAKE_PERIODS_S, self._phases[at : at + 2]) for at in (0, 2))
        return round(reach * down), round(reach * right)

    def background(self, pixels: UInt8Array, time_s: float) -> UInt8Array:
        """Returns the part of an endless background, mirrored at its edges, behind the objects: a copy."""
        if not self.footage.shake and not self.footage.pan_per_s:
            return pixels.copy()
        down, right = self.shift(time_s)
        panned = round(self._pan_per_s * self._width * time_s)
        rows, columns = _mirrored(self._height, -down), _mirrored(self._width, panned - right)
        return pixels[rows][:, columns]

    def finish(self, canvas: UInt8Array, time_s: float) -> UInt8Array:
        """Returns the picture with what comes before the objects; draws into the canvas."""
        for columns in self._posts(time_s):
            canvas[:, columns] = self._post_colour
        if self.footage.noise or self.footage.lighting:
            canvas = self._exposed(canvas, time_s)
        if self.footage.has_label:
            seconds = int(time_s)
            clock = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            _write(canvas, f"CAM {self._number} {clock}", max(1, self._height // 120))
        return canvas

    def _posts(self, time_s: float) -> Iterator[slice]:
        """Yields the columns of posts, evenly spaced: at most one stands before an object."""
        unit = min(self._width / NUM_LANES, self._height)
        wide = max(1, round(_POST_WIDTH * self.footage.sizes[0] * unit))
        for number in range(self.footage.num_posts):
            share = self._post_start + self._post_speed * time_s + number / self.footage.num_posts
            left = round(share % 1 * (self._width + wide)) - wide + self.shift(time_s)[1]
            yield slice(max(0, left), max(0, left + wide))

    def _exposed(self, canvas: UInt8Array, time_s: float) -> UInt8Array:
        gain = 1 + self.footage.lighting * _wave(time_s, _LIGHT_PERIODS_S, self._phases[4:])
        rng = np.random.default_rng([_STREAM, self._seed, round(time_s * 1000)])
        grain = rng.standard_normal((self._height, self._width, 1), np.float32)
        exposed = canvas * np.float32(gain) + grain * np.float32(self.footage.noise)
        return np.asarray(np.clip(exposed, 0, 255), np.uint8)


def _wave(time_s: float, periods_s: tuple[float, float], phases: NDArray[np.float64]) -> float:
    """Returns a smooth function of time between -1 and 1."""
    waves = zip(periods_s, phases, strict=True)
    return sum(math.sin(2 * math.pi * time_s / period_s + phase) for period_s, phase in waves) / 2


def _mirrored(length: int, start: int) -> NDArray[np.intp]:
    """Returns `length` indices from `start` on, into a line of that length continued by its mirror image."""
    place = (np.arange(length) + start) % (2 * length)
    return np.asarray(np.where(place < length, place, 2 * length - 1 - place), np.intp)


# Five rows of three pixels a letter, each row an octal digit.
_FONT = {
    "0": 0o75557,
    "1": 0o26227,
    "2": 0o71747,
    "3": 0o71717,
    "4": 0o55711,
    "5": 0o74717,
    "6": 0o74757,
    "7": 0o71111,
    "8": 0o75757,
    "9": 0o75717,
    "A": 0o25755,
    "C": 0o74447,
    "M": 0o57755,
    ":": 0o02020,
    " ": 0,
}


def _write(canvas: UInt8Array, text: str, scale: int) -> None:
    """Writes white letters on a dark strip into the upper left corner, clipped at the edges."""
    bits = np.zeros((7, 4 * len(text) + 1), np.uint8)
    for index, letter in enumerate(text):
        rows = [[_FONT[letter] >> (14 - 3 * row - column) & 1 for column in range(3)] for row in range(5)]
        bits[1:6, 1 + 4 * index : 4 + 4 * index] = rows
    strip = np.kron(bits, np.ones((scale, scale), np.uint8))[: canvas.shape[0], : canvas.shape[1], None]
    canvas[: strip.shape[0], : strip.shape[1]] = 25 + 215 * strip


class SceneRenderer:
    """Draws frames of one scene at one size; holds one background, no frames."""

    def __init__(self, scene: Scene, height: int, width: int, footage: Footage = STILL) -> None:
        self.scene = scene = resized(scene, footage)
        self.height, self.width = height, width
        self._camera = Camera(footage, scene.seed, height, width)
        rng = np.random.default_rng(scene.seed)
        self._background = _draw_background(rng, height, width)
        self._sprites = {item.shape: _Sprite(rng, item, height, width) for item in scene.objects}

    def frame(self, time_s: float, background: UInt8Array | None = None) -> UInt8Array:
        """Returns the frame at `time_s`: uint8 [H, W, 3], RGB.

        background: uint8 [H, W, 3], in place of the drawn one.
        """
        canvas = self._camera.background(self._background if background is None else background, time_s)
        down, right = self._camera.shift(time_s)
        for item in self.scene.visible(time_s):
            x, y = item.position(time_s)
            centre = round(x * self.width) + right, round(y * self.height) + down
            self._sprites[item.shape].paint(canvas, *centre)
        return self._camera.finish(canvas, time_s)


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
