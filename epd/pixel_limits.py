"""Says how many pixels images and frames of videos are resized to.

Of a request's limits, `min_pixels` and `max_pixels` come before `size`, and that before the processor's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from epd.errors import RequestError

_FIELD = "mm_processor_kwargs"
CAP_FIELD = f"{_FIELD}.cap_pixels_per_frame"
# The most pixels of an image in low detail: OpenAI's square of 512 x 512.
LOW_DETAIL_PIXELS = 512 * 512
# Caps leave a frame this part of the least pixels at least, as qwen-vl-utils and transformers have it.
LEAST_SHARE = 1.05


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """Limits the pixels of an image or frame, as the arguments of a transformers processor do.

    size: the least and the most pixels, which stand for the processor's own
    is_low_detail: whether an image has at most LOW_DETAIL_PIXELS, or is one tile
    cap_pixels_per_frame: whether frames are held to the authors' limits; None as the server has it
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    size: tuple[int, int] | None = None
    is_low_detail: bool = False
    cap_pixels_per_frame: bool | None = None

    @property
    def named(self) -> Mapping[str, int]:
        """Returns what is set, by the name that the field of a request has."""
        least, most = self.size or (None, None)
        values = {
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "size.shortest_edge": least,
            "size.longest_edge": most,
        }
        return {f"{_FIELD}.{name}": value for name, value in values.items() if value is not None}

    @property
    def all_named(self) -> tuple[str, ...]:
        """Returns the names of all that is set."""
        return (*self.named, *(() if self.cap_pixels_per_frame is None else (CAP_FIELD,)))

    @property
    def least(self) -> int:
        """Returns the pixels that each image is enlarged to, 0 if nothing is said."""
        return self.min_pixels or (self.size[0] if self.size else 0)

    def check(self) -> None:
        """Raises RequestError for limits between which nothing lies."""
        _, most = self.within((self.least, self.least))
        if self.least > most:
            shown = [f"{name} {value:,}" for name, value in self.named.items()]
            low = [f"detail low, {LOW_DETAIL_PIXELS:,} pixels"] if self.is_low_detail else []
            received = ", ".join(shown + low)
            raise RequestError(
                f"received {received}; allowed: at least as many pixels at most; raise the larger limit or "
                "lower the other"
            )

    def within(self, own: tuple[int, int]) -> tuple[int, int]:
        """Returns the least and the most pixels. own: those of the processor."""
        least, most = self.size or own
        least, most = self.min_pixels or least, self.max_pixels or most
        return least, min(most, LOW_DETAIL_PIXELS) if self.is_low_detail else most


@dataclass(frozen=True, slots=True)
class FrameCaps:
    """Limits the frames of one video besides the processor's `size`.

    frame_pixels: of each. video_pixels: of all together. Either is infinite for no limit.
    """

    frame_pixels: float = math.inf
    video_pixels: float = math.inf

    def share(self, num_frames: int, most: float = math.inf) -> float:
        """Returns the pixels of one of so many frames at most. most: of all of them, besides."""
        return min(self.frame_pixels, min(self.video_pixels, most) / num_frames)


NO_CAPS = FrameCaps()
OWN_LIMITS = PixelLimits()


def refuse(name: str, allowed: str) -> RequestError:
    """Returns the error for a field that changes nothing for the media of a request."""
    return RequestError(f"received {name}; allowed: {allowed}; leave it out")


def check_ceiling(name: str, received: int, allowed: int) -> None:
    """Raises RequestError for a limit of pixels above the server's ceiling."""
    if received > allowed:
        raise RequestError(
            f"received {name} {received:,}; allowed: at most {allowed:,} pixels, the model's own limit or "
            "the server's max_resize_pixels, if that is larger; lower it"
        )
