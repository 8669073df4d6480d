"""Draws scenes with the instants that a video of them is sampled at, for a model that reads timestamps."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from epd.shapes import SHAPES, Question, QuestionKind, Scene, make_questions, make_scene
from epd.shapes.world import max_objects
from training.clips import HELD_OUT_SEED, cropped
from training.lanes import EMPTY, HEIGHT, SCALE, TOKENS, codes, embeddings
from training.stories import still_description, stories_at, timestamps_s

_LONGEST_S = 1000.0
UNTIMED = -1  # seconds of what has no time
_SHARE_USUAL, _SHARE_PART = 0.5, 0.25  # the rest is of any length
_SOURCE_FPS = (2, 4, 10, 24, 30)
# What the tower is off by, in shares of a name's direction, of the height's range, and in each dimension.
_NAME_NOISE, _HEIGHT_NOISE, _NOISE = 0.1, 0.05, 0.03


@dataclass(frozen=True, slots=True)
class Shown:
    """A video or an image as the language model is to see it.

    times_s: of its frames; one for an image.
    scene: only what the frames show, in order of appearance, each in a later pair than the one before.
    """

    scene: Scene
    times_s: tuple[float, ...]
    is_image: bool = False

    def __len__(self) -> int:
        """Returns the number of pairs of frames."""
        return 1 if self.is_image else len(self.times_s) // 2

    @property
    def gap_s(self) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(self.times_s))

    def codes(self) -> Tensor:
        """Returns float32 [P, 3, CODE_SIZE]."""
        return codes(self.scene, self.times_s * 2 if self.is_image else self.times_s)


@dataclass(frozen=True, slots=True)
class TowerErrors:
    """Holds what a tower was off by, of tokens that show nothing and of others: float32 [N, C], [M, C]."""

    empty: Tensor
    shown: Tensor

    def drawn(self, is_empty: Tensor) -> Tensor:
        """Draws one for each token, bool [...]: float32 [..., C]."""
        first, second = (each[torch.randint(len(each), is_empty.shape)] for each in (self.empty, self.shown))
        return torch.where(is_empty[..., None], first, second)


class Imagined:
    """Gives the embeddings of what is never drawn, as far off as a tower's are."""

    def __init__(self, errors: TowerErrors | None = None) -> None:
        """errors: what a tower was off by; None draws some."""
        self._errors = errors

    def __call__(self, shown: Shown) -> Tensor:
        """Returns float32 [P, 3, C]."""
        code = shown.codes()
        if self._errors is not None:
            return embeddings(code) + self._errors.drawn(code[..., EMPTY] > 0)
        seen = code * (1 + _NAME_NOISE * torch.randn_like(code))
        seen[..., HEIGHT] = code[..., HEIGHT] + _HEIGHT_NOISE * torch.randn_like(code[..., HEIGHT])
        exact = embeddings(seen)
        return exact + SCALE * _NOISE * torch.randn_like(exact)


def draw_shown(rng: random.Random, num_pairs: int) -> Shown:
    """Draws a video of `num_pairs` pairs of frames, often one frame a second; 0 draws an image."""
    while True:
        shown = _draw_image(rng) if num_pairs == 0 else _draw_video(rng, num_pairs * 2)
        if shown is not None:
            return shown


def _draw_image(rng: random.Random) -> Shown | None:
    scene = make_scene(rng.randrange(HELD_OUT_SEED), rng.uniform(8.0, 64.0))
    time_s = rng.uniform(0, scene.duration_s)
    objects = tuple(scene.visible(time_s))
    return Shown(dataclasses.replace(scene, objects=objects), (time_s,), is_image=True) if objects else None


def _draw_video(rng: random.Random, num_frames: int) -> Shown | None:
    kind = rng.random()
    if kind < _SHARE_USUAL:
        scene = _draw_scene(rng, float(num_frames), num_frames)
    elif kind < _SHARE_USUAL + _SHARE_PART:
        whole = _draw_scene(rng, num_frames * rng.uniform(1.2, 3.0), num_frames)
        scene = part(whole, rng.uniform(0, whole.duration_s - num_frames), float(num_frames))
    else:
        duration_s = math.exp(rng.uniform(math.log(max(4.0, num_frames / 2)), math.log(_LONGEST_S)))
        scene = _draw_scene(rng, duration_s, num_frames)
    return resolved(scene, sampled_times_s(rng, scene.duration_s, num_frames))


def _draw_scene(rng: random.Random, duration_s: float, num_frames: int) -> Scene:
    """Draws a scene; numbers of objects are spread evenly."""
    count = rng.randint(1, min(max_objects(duration_s), max(1, num_frames // 2)))
    return make_scene(rng.randrange(HELD_OUT_SEED), duration_s, count)


def sampled_times_s(rng: random.Random, duration_s: float, num_frames: int) -> tuple[float, ...]:
    """Returns evenly spread instants, mostly of frames of a file, from its first to its last."""
    if rng.random() < 0.3:
        return tuple(index * duration_s / num_frames for index in range(num_frames))
    fps = rng.choice(_SOURCE_FPS)
    last = max(num_frames, round(duration_s * fps)) - 1
    return tuple(round(index * last / (num_frames - 1)) / fps for index in range(num_frames))


def part(scene: Scene, start_s: float, length_s: float) -> Scene:
    """Returns what is seen in [start_s, start_s + length_s), in the time of the part."""
    end_s = start_s + length_s
    kept = [item for item in scene.objects if item.start_s < end_s and start_s < item.end_s]
    return Scene(scene.seed, length_s, tuple(cropped(item, start_s, end_s) for item in kept))


def resolved(scene: Scene, times_s: tuple[float, ...]) -> Shown | None:
    """Returns what frames at `times_s` show; None if nothing, or two objects first in the same two frames."""
    firsts, objects = [], []
    for item in scene.objects:
        seen = [index for index, time_s in enumerate(times_s) if item.is_visible(time_s)]
        if seen:
            firsts.append(seen[0] // 2)
            objects.append(item)
    if not objects or any(later <= earlier for earlier, later in itertools.pairwise(firsts)):
        return None
    return Shown(dataclasses.replace(scene, objects=tuple(objects)), times_s)


def questions_about(shown: Shown, rng: random.Random, times: int, stories: int) -> list[Question]:
    """Draws questions of every kind.

    times: about an instant; two of presence and one of each other kind that one word answers.
    stories: of each kind of more words, but one description and one as JSON.
    """
    if shown.is_image:
        asked = make_questions(shown.scene, rng, 1)
        kinds = (QuestionKind.COLOUR, QuestionKind.PRESENCE, QuestionKind.COUNT)
        still = Question(QuestionKind.DESCRIBE, rng.choice(_STILL), still_description(shown.scene))
        return [*(each for each in asked if each.kind in kinds), still]
    asked = make_questions(shown.scene, rng, times, time_margin_s=2 * shown.gap_s)
    wanted = {QuestionKind.TIME: times, QuestionKind.PRESENCE: min(2, times)}
    short = [
        each for kind in QuestionKind for each in [q for q in asked if q.kind is kind][: wanted.get(kind, 1)]
    ]
    return short + stories_at(shown.scene, rng, shown.times_s, stories)


_STILL = ("Describe the image.", "What is in the image?", "Describe what you see.")


@dataclass(frozen=True, slots=True)
class Events:
    """States what one look at a visual token cannot tell, V tokens.

    appears, left: float32 [V, 6], 1 for a shape whose first two frames these are, or whose last were the
        two before in this lane.
    is_one: bool [V], True where a token shows one object.
    fallen: float32 [V], how much lower that object is than it was first, in shares of the frame's height.
    ordinal: int64 [V], how many objects appeared before it.
    was_one: bool [V], True where the two frames before showed one object in this lane.
    height: float32 [V], of that object then, as codes have it.
    seconds: int64 [V, 2], the whole seconds of these two frames' time and of that before, UNTIMED for none.
    """

    appears: Tensor
    left: Tensor
    is_one: Tensor
    fallen: Tensor
    ordinal: Tensor
    was_one: Tensor
    height: Tensor
    seconds: Tensor

    @classmethod
    def of(cls, shown: Sequence[Shown]) -> Events:
        parts = [_events(each) for each in shown]
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def kept(self, kept: Tensor) -> Events:
        """Returns those of the tokens that are kept, bool [V]."""
        return Events(*(getattr(self, each.name)[kept] for each in dataclasses.fields(self)))


def _events(shown: Shown) -> tuple[Tensor, ...]:
    times_s = shown.times_s * 2 if shown.is_image else shown.times_s
    size = (len(shown), TOKENS)
    appears, left = torch.zeros(*size, len(SHAPES)), torch.zeros(*size, len(SHAPES))
    count, fallen, ordinal = torch.zeros(size), torch.zeros(size), torch.zeros(size, dtype=torch.int64)
    for number, item in enumerate(shown.scene.objects):
        seen = [index for index, time_s in enumerate(times_s) if item.is_visible(time_s)]
        shape, (first, last) = SHAPES.index(item.shape), (seen[0] // 2, seen[-1] // 2)
        appears[first, item.lane, shape] = 1
        if last + 1 < len(shown):
            left[last + 1, item.lane, shape] = 1
        count[first : last + 1, item.lane] += 1
        ordinal[first : last + 1, item.lane] = number
        for pair in range(first, last + 1):
            now = max(index for index in seen if index // 2 <= pair)
            lowered = item.position(times_s[now])[1] - item.position(times_s[seen[0]])[1]
            fallen[pair, item.lane] = lowered
    seconds = _seconds(shown)[:, None].expand(-1, TOKENS, -1)
    is_one = count == 1
    was_one = functional.pad(is_one[:-1], (0, 0, 1, 0))
    height = functional.pad(shown.codes()[:-1, :, HEIGHT], (0, 0, 1, 0))
    columns = (appears, left, is_one, fallen, ordinal, was_one, height, seconds)
    return tuple(each.flatten(0, 1) for each in columns)


def _seconds(shown: Shown) -> Tensor:
    """Returns when each pair of frames is, and when the one before: int64 [P, 2], in whole seconds."""
    own = [UNTIMED] if shown.is_image else [int(stamp_s) for stamp_s in timestamps_s(shown.times_s)]
    return torch.tensor(list(zip(own, [UNTIMED, *own[:-1]], strict=True)))
