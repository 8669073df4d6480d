"""Finds sizes of media for a trace, which says how many tokens they took or only how many there were."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from epd.workload.requests import RequestShape, Resolution

_IMAGE_SIZE, _VIDEO_SIZE = Resolution(448, 448), Resolution(640, 360)
_LEAST_SIDE, _LARGEST_SIDE = 32, 8192


@dataclass(frozen=True, slots=True)
class ModelSight:
    """How the model that was asked looks at media, to find sizes that give the same number of tokens.

    token_side: pixels, of the square that becomes one visual token.
    frames_per_token: how many frames of a video share a token.
    frames_per_s: how many frames of a video are sampled per second.
    """

    token_side: int = 28
    frames_per_token: int = 2
    frames_per_s: float = 2.0

    def size(self, num_tokens: float) -> Resolution:
        """Returns a nearly square size that gives `num_tokens` tokens."""
        return _size(num_tokens, self.token_side)


@cache
def _size(num_tokens: float, token_side: int) -> Resolution:
    wide = max(1, round(math.sqrt(num_tokens)))
    high = max(1, round(num_tokens / wide))
    return Resolution(_pixels(wide * token_side), _pixels(high * token_side))


def _pixels(side: int) -> int:
    """Returns an even number of pixels that a `Resolution` allows."""
    return min(_LARGEST_SIDE, max(_LEAST_SIDE, side)) // 2 * 2


@dataclass(frozen=True, slots=True)
class TraceMedia:
    """What a trace does not say: sizes of media, and how many tokens of the context an image took.

    max_text_tokens, max_output_tokens: longer texts and answers are cut, for models with a shorter context.
    sight: of the model that was asked, for traces with tokens of media.
    """

    image_size: Resolution = _IMAGE_SIZE
    tokens_per_image: int = 256
    video_fps: int = 24
    video_size: Resolution = _VIDEO_SIZE
    max_text_tokens: int | None = None
    max_output_tokens: int | None = None
    sight: ModelSight = field(default_factory=ModelSight)

    def text_tokens(self, number: int) -> int:
        """Returns the tokens of a text, at least one and cut if it is longer than allowed."""
        return max(1, min(number, self.max_text_tokens or number))

    def output_tokens(self, number: int) -> int:
        """Returns the tokens of an answer, at least one and cut if it is longer than allowed."""
        return max(1, min(number, self.max_output_tokens or number))


class TracedRequest(Protocol):
    """One request of a trace."""

    @property
    def time_s(self) -> float:
        """When it came, from the first of the trace."""
        ...

    def shape(self, media: TraceMedia) -> RequestShape:
        """Returns a request of its size."""
        ...
