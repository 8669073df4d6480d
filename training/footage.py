"""Films scenes of the shapes world: how the camera moves, light and noise, and what is before the objects.

An object's truth does not depend on it: the picture shifts by a few pixels only, and a post before an object
hides a part of it, so that looking at each frame finds the same objects at the same times.

    background, shifted | objects | posts | light, noise | label        drawn in this order

Backgrounds are drawn, or videos of a folder in loops: a clip is scaled to cover the frame, cut to it around
its centre, and muted as drawn backgrounds are, so that the objects before it can be told from it.

Shapes: H frame height, W frame width in pixels.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby, tee
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epd.errors import MediaError, RequestError
from epd.shapes.world import NUM_LANES, Scene, SceneRenderer
from epd.types import UInt8Array
from epd.video.containers.probe import probe
from epd.video.decoding.pixels import Size
from epd.video.decoding.stream import stream
from epd.video.demo_video import write_demo_video

# Of the least size of objects, in the unit of their radius: a post hides at most half of an object.
_POST_WIDTH = 0.22
_MAX_POSTS = 3
_SHAKE_PERIODS_S = (1.7, 0.6)
_LIGHT_PERIODS_S = (23.0, 5.0)
_STREAM = 0xF007  # keeps these random numbers apart from those of the picture
_DARKEST, _SHARE_OF_CONTRAST = 40, 2


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


class FilmedRenderer(SceneRenderer):
    """Draws frames of one scene as it is filmed."""

    def __init__(self, scene: Scene, height: int, width: int, footage: Footage = STILL) -> None:
        super().__init__(resized(scene, footage), height, width)
        self._camera = Camera(footage, scene.seed, height, width)

    def frame(self, time_s: float, background: UInt8Array | None = None) -> UInt8Array:
        """Returns the frame at `time_s`: uint8 [H, W, 3], RGB.

        background: uint8 [H, W, 3], in place of the drawn one.
        """
        behind = self._background if background is None else background
        canvas = self._camera.background(behind, time_s)
        self._paint(canvas, time_s, self._camera.shift(time_s))
        return self._camera.finish(canvas, time_s)


@dataclass(frozen=True, slots=True)
class _Clip:
    """One video. size: (height, width), pixels."""

    path: Path
    duration_s: float
    size: Size


class BackgroundClips:
    """The videos of a folder, ordered by name; holds no frames."""

    def __init__(self, folder: Path) -> None:
        """Raises RequestError for a folder without a video that can be read."""
        self.folder = folder
        paths = sorted(path for path in folder.glob("*") if path.is_file())
        self._clips = [clip for clip in map(_read, paths) if clip is not None]
        if not self._clips:
            raise RequestError(
                f"received the backgrounds {str(folder)!r}, with {len(paths)} files and no video among them; "
                "allowed: folders of videos; name another"
            )

    def play(self, seed: int, times_s: Iterable[float], height: int, width: int) -> Iterator[UInt8Array]:
        """Yields a background for each time, uint8 [H, W, 3]; the seed chooses the clip.

        times_s: increasing. Raises MediaError for a clip that cannot be decoded.
        """
        clip = self._clips[seed % len(self._clips)]
        size = _covering(clip.size, (height, width))
        for loop, times in groupby(times_s, lambda time_s: time_s // clip.duration_s):
            wanted = [max(0.0, time_s - loop * clip.duration_s) for time_s in times]
            with stream(clip.path, wanted, size, workers=1, groups_ahead=1) as groups:
                for group in groups:
                    for image in group.frames.data:
                        yield _muted(_centre(image, height, width))


def _read(path: Path) -> _Clip | None:
    try:
        info = probe(path)
    except MediaError:
        return None
    return _Clip(path, info.duration_s, (info.height, info.width)) if info.duration_s > 0 else None


def _covering(size: Size, frame: Size) -> Size:
    """Returns the least size with the clip's proportions that covers the frame."""
    scale = max(frame[0] / size[0], frame[1] / size[1])
    return max(frame[0], round(size[0] * scale)), max(frame[1], round(size[1] * scale))


def _centre(image: UInt8Array, height: int, width: int) -> UInt8Array:
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


def _muted(image: UInt8Array) -> UInt8Array:
    """Returns the image with half of its contrast, values 40 to 167."""
    return np.asarray(image // _SHARE_OF_CONTRAST + _DARKEST, np.uint8)


@dataclass(frozen=True, slots=True)
class Filming:
    """Says how scenes are filmed. backgrounds: what is behind the objects; None draws it."""

    footage: Footage = STILL
    backgrounds: BackgroundClips | None = None

    @classmethod
    def of(cls, level: str, folder: Path | None) -> Filming:
        """Returns a level of footage, with the clips of a folder. Raises RequestError."""
        return cls(footage_level(level), None if folder is None else BackgroundClips(folder))

    def frames(self, scene: Scene, times_s: Iterable[float], height: int, width: int) -> Iterator[UInt8Array]:
        """Yields the scene's frames, uint8 [H, W, 3], at increasing times. Raises MediaError."""
        renderer = FilmedRenderer(scene, height, width, self.footage)
        if self.backgrounds is None:
            yield from map(renderer.frame, times_s)
        else:
            times_s, shown_s = tee(times_s)
            behind = self.backgrounds.play(scene.seed, shown_s, height, width)
            yield from map(renderer.frame, times_s, behind)

    def record(self) -> dict[str, object]:
        """Returns what a truth file says of it: nothing, where nothing disturbs the picture."""
        footage = {} if self.footage == STILL else {"footage": asdict(self.footage)}
        return footage | ({"background": str(self.backgrounds.folder)} if self.backgrounds else {})


PLAIN = Filming()


def write_filmed(out: Path, scene: Scene, filming: Filming = PLAIN, **options: Any) -> Path:
    """Writes a scene as `write_demo_video` does, as it is filmed; its truth file says how.

    options: of `write_demo_video`. Raises RequestError, MediaError.
    """
    shown = resized(scene, filming.footage)
    truth = write_demo_video(out, shown, draw=lambda _, *place: filming.frames(scene, *place), **options)
    record = json.loads(truth.read_text()) | filming.record()
    truth.write_text(json.dumps(record, indent=2) + "\n")
    return truth
