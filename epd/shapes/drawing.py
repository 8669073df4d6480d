"""Draws the frames of scenes: a textured background, and the objects before it.

Shapes: H frame height, W frame width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from epd.shapes.world import COLOURS, NUM_LANES, Scene, SceneObject
from epd.types import UInt8Array

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
