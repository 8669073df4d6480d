"""Defines what is sent to a server and when, for the traffic generator and the simulator alike. No I/O.

    Workload = arrivals (when) x shapes (what) x repeat_rate (how much of it is known already)

Everything follows from (seed, round): the same pair draws the same requests, another round the same kind of
requests with other content. When, what and which content come from three streams, so that another rate sends
the same requests at other times.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from epd.errors import RequestError
from epd.workload.arrivals import ArrivalTimes, ClosedArrivals
from epd.workload.distributions import SizeDistribution, pick_weighted

_NUM_REPEATABLE = 256
_NUM_OPEN = 8  # media that are asked about by turns, where each has several questions
_SEED_BOUND = 2**63
_NONE = SizeDistribution.of(0)
_SHORT_TEXT = SizeDistribution.of(16)
_SHORT_ANSWER = SizeDistribution.of(32)
_HALF_A_MINUTE = SizeDistribution.of(30)
_TEN_S = SizeDistribution.of(10)


@dataclass(frozen=True, slots=True, order=True)
class Resolution:
    """Width and height in pixels, both even and at least 32, written as 640x360."""

    width: int
    height: int

    def __post_init__(self) -> None:
        if any(side % 2 or not 32 <= side <= 8192 for side in (self.width, self.height)):
            raise RequestError(
                f"size is {self}, it must be WIDTHxHEIGHT, even numbers of 32 to 8192; try 640x360"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        match = re.fullmatch(r"(\d+)x(\d+)", text.strip())
        if not match:
            raise RequestError(f"size is {text!r}, it must be WIDTHxHEIGHT in pixels; try 640x360")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


@dataclass(frozen=True, slots=True, order=True)
class VideoSpec:
    """A video to be drawn. fps: frames per second of the file, not of the sampling."""

    duration_s: float
    fps: int
    size: Resolution

    @property
    def num_frames(self) -> int:
        return max(1, round(self.duration_s * self.fps))


@dataclass(frozen=True, slots=True, order=True)
class AudioClip:
    """A clip of sound to be made."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The size of one request. text_tokens: of the question, about; output_tokens: the longest answer."""

    text_tokens: int
    output_tokens: int
    images: tuple[Resolution, ...] = ()
    videos: tuple[VideoSpec, ...] = ()
    audios: tuple[AudioClip, ...] = ()

    def __post_init__(self) -> None:
        if self.text_tokens < 1 or self.output_tokens < 1:
            raise RequestError(
                f"a request needs at least 1 text and 1 output token, got {self.text_tokens} and "
                f"{self.output_tokens}"
            )

    @property
    def kind(self) -> str:
        """What the request is about: "video" if it has any, else "image", "audio" or "text"."""
        kinds = (("video", self.videos), ("image", self.images), ("audio", self.audios))
        return next((kind for kind, media in kinds if media), "text")

    @property
    def has_media(self) -> bool:
        return bool(self.images or self.videos or self.audios)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come. Equal seeds of equal specs are equal content; repeat_of: whose content this is."""

    index: int
    due_s: float
    shape: RequestShape
    media_seed: int
    text_seed: int
    repeat_of: int | None = None


class RequestShapes(Protocol):
    """A stream of request shapes."""

    def draw(self, rng: np.random.Generator, /) -> Iterator[RequestShape]:
        """Yields shapes in the order of arrival; endless but for a trace."""
        ...


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """Requests of one kind: how many of what, each drawn anew for every request. weight: share in a mix."""

    text_tokens: SizeDistribution = _SHORT_TEXT
    output_tokens: SizeDistribution = _SHORT_ANSWER
    images: SizeDistribution = _NONE
    image_size: tuple[Resolution, ...] = (Resolution(224, 224),)
    videos: SizeDistribution = _NONE
    video_s: SizeDistribution = _HALF_A_MINUTE
    video_fps: int = 24
    video_size: tuple[Resolution, ...] = (Resolution(640, 360),)
    weight: float = 1.0
    audios: SizeDistribution = _NONE
    audio_s: SizeDistribution = _TEN_S

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise RequestError(f"the weight of a part of a mix is {self.weight}, it must be above 0")
        if not self.image_size or not self.video_size:
            raise RequestError("no image or video sizes are given; leave them out or name at least one")
        if self.video_s.low < 1:
            raise RequestError(f"videos last {self.video_s} s, they must last at least 1 s")
        if self.audio_s.low < 0.1:
            raise RequestError(f"audio lasts {self.audio_s} s, it must last at least 0.1 s")
        if not 1 <= self.video_fps <= 240:
            raise RequestError(f"video fps is {self.video_fps}, it must be 1 to 240")

    def draw_one(self, rng: np.random.Generator) -> RequestShape:
        return RequestShape(
            self.text_tokens.draw_count(rng),
            self.output_tokens.draw_count(rng),
            tuple(_choose(rng, self.image_size) for _ in range(self.images.draw_count(rng))),
            tuple(self._draw_video(rng) for _ in range(self.videos.draw_count(rng))),
            self._draw_audios(rng),
        )

    def _draw_video(self, rng: np.random.Generator) -> VideoSpec:
        # Tenths of seconds, so that the names of files read well and mean exactly one length.
        return VideoSpec(round(self.video_s.draw(rng), 1), self.video_fps, _choose(rng, self.video_size))

    def _draw_audios(self, rng: np.random.Generator) -> tuple[AudioClip, ...]:
        if self.audios == _NONE:  # nothing is drawn, so that requests without sound stay as they were
            return ()
        return tuple(AudioClip(round(self.audio_s.draw(rng), 1)) for _ in range(self.audios.draw_count(rng)))


def _choose(rng: np.random.Generator, sizes: Sequence[Resolution]) -> Resolution:
    return sizes[int(rng.integers(len(sizes)))]


@dataclass(frozen=True, slots=True)
class Mix:
    """Several kinds of requests, each drawn with a probability in proportion to its weight."""

    classes: tuple[ShapeClass, ...]

    def __post_init__(self) -> None:
        if not self.classes:
            raise RequestError("a mix of 0 kinds of requests has nothing to draw; name at least 1")

    def draw(self, rng: np.random.Generator, /) -> Iterator[RequestShape]:
        weights = [one.weight for one in self.classes]
        while True:
            yield self.classes[pick_weighted(rng, weights)].draw_one(rng)


@dataclass(frozen=True, slots=True)
class TraceShapes:
    """The shapes of a trace, as they are."""

    shapes: tuple[RequestShape, ...]

    def draw(self, _rng: np.random.Generator, /) -> Iterator[RequestShape]:
        return iter(self.shapes)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests over time. Ends after num_requests, at duration_s, or with its trace, whichever comes first.

    repeat_rate: share of the requests that ask something new about the media of an earlier request, one of
        the latest 256 new ones; without media the whole text is repeated.
    repeat_skew: how much later media are preferred: the k-th latest in proportion to 1 / k ** skew (Zipf's
        law); 0 for all alike.
    questions_per_media: requests about the same media, mixed with those about 7 others; no repeat_rate then.
    """

    name: str
    arrivals: ArrivalTimes
    shapes: RequestShapes
    num_requests: int | None = None
    duration_s: float | None = None
    repeat_rate: float = 0.0
    repeat_skew: float = 0.0
    questions_per_media: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.repeat_skew < math.inf:
            raise RequestError(f"repeat skew is {self.repeat_skew}, it must be 0 (all alike) or above")
        if self.questions_per_media < 1 or (self.questions_per_media > 1 and self.repeat_rate):
            raise RequestError(
                f"questions per media are {self.questions_per_media}, the repeat rate is {self.repeat_rate}; "
                "questions must be at least 1, and only one of the two may be given"
            )
        if not 0 <= self.repeat_rate <= 1:
            raise RequestError(f"repeat rate is {self.repeat_rate}, it must be 0 (all new) to 1")
        if self.num_requests is not None and self.num_requests < 1:
            raise RequestError(f"number of requests is {self.num_requests}, it must be at least 1")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise RequestError(f"duration is {self.duration_s} s, it must be above 0")

    @property
    def has_repeats(self) -> bool:
        """Whether media or texts come more than once."""
        return self.repeat_rate > 0 or self.questions_per_media > 1

    @property
    def is_open_loop(self) -> bool:
        """Whether a clock says when to send, not the answers."""
        return not isinstance(self.arrivals, ClosedArrivals)

    def requests(self, seed: int, round_index: int = 0, copy: int = 0) -> Iterator[PlannedRequest]:
        """Yields the requests of one round, in order of arrival; drawn as they are taken.

        copy: another one has the same times and shapes, and other content.
        """
        if seed < 0:
            raise RequestError(f"seed is {seed}, it must be 0 or above")
        when, what, which = (
            np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(round_index, *stream)))
            for stream in ((0,), (1,), (2, copy))
        )
        content = _Content(which, self)
        pairs = zip(self.arrivals.times_s(when), self.shapes.draw(what), strict=False)
        for index, (due_s, shape) in enumerate(pairs):
            if index == self.num_requests or (self.duration_s is not None and due_s >= self.duration_s):
                return
            yield content.fill(index, due_s, shape)


class _Content:
    """Gives each request its content: new, or that of an earlier one."""

    def __init__(self, rng: np.random.Generator, workload: Workload) -> None:
        self._rng = rng
        self._repeat_rate = workload.repeat_rate
        self._skew = workload.repeat_skew
        self._num_questions = workload.questions_per_media
        # Those with media and those without apart: a repeat keeps the kind that was drawn.
        self._earlier = {kind: deque[PlannedRequest](maxlen=_NUM_REPEATABLE) for kind in (True, False)}
        self._open: list[tuple[PlannedRequest, int]] = []  # with the questions that are still to come

    def fill(self, index: int, due_s: float, shape: RequestShape) -> PlannedRequest:
        # Always as many draws, so that another repeat rate does not change the content of the others.
        media_seed, text_seed = self._rng.integers(_SEED_BOUND, size=2).tolist()
        lot = float(self._rng.random())
        first = self._first(lot, has_media=shape.has_media)
        if first is not None:
            return _repeated(first, index, due_s, shape, text_seed)
        new = PlannedRequest(index, due_s, shape, media_seed, text_seed)
        self._earlier[shape.has_media].append(new)
        if shape.has_media and self._num_questions > 1:
            self._open.append((new, self._num_questions - 1))
        return new

    def _first(self, lot: float, *, has_media: bool) -> PlannedRequest | None:
        """Returns the earlier request whose media are asked about again; None for new ones. lot: 0 to 1."""
        earlier = self._earlier[has_media]
        if lot < self._repeat_rate and earlier:
            return earlier[self._place(lot / self._repeat_rate, len(earlier))]
        if has_media and len(self._open) >= _NUM_OPEN:
            return self._next_of(int(lot * len(self._open)))
        return None

    def _place(self, lot: float, num_earlier: int) -> int:
        """Returns the place of an earlier request, the latest one last."""
        if not self._skew:
            return int(lot * num_earlier)
        weights = np.arange(num_earlier, 0, -1.0) ** -self._skew
        return int(np.searchsorted(np.cumsum(weights) / weights.sum(), lot, side="right"))

    def _next_of(self, place: int) -> PlannedRequest:
        first, num_left = self._open[place]
        if num_left > 1:
            self._open[place] = first, num_left - 1
        else:
            del self._open[place]
        return first


def _repeated(
    first: PlannedRequest, index: int, due_s: float, shape: RequestShape, text_seed: int
) -> PlannedRequest:
    """Returns a new question about the media of `first`, or its whole text if it has none."""
    if shape.has_media:
        known = first.shape
        shape = replace(shape, images=known.images, videos=known.videos, audios=known.audios)
    else:
        shape, text_seed = replace(shape, text_tokens=first.shape.text_tokens), first.text_seed
    return PlannedRequest(index, due_s, shape, first.media_seed, text_seed, first.index)
