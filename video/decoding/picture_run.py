"""Decodes listed frames and animated pictures, one after another, each when its group is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from epd.colour import Colour
from epd.errors import CancelledError
from epd.types import FrameGroup, Frames, UInt8Array
from epd.video.containers.animated_files import Animation
from epd.video.containers.animation import Drawing, check_animation, frame_at
from epd.video.containers.images import exif_orientation, load_image, upright_size
from epd.video.containers.orientation import TURNED, upright_by_exif
from epd.video.decoding.pixels import Size, exact_resize
from epd.video.decoding.run import RunOptions
from epd.video.sources.frame_list import LIST_FPS, FrameList
from epd.video.sources.source import Media


class Pictures(Protocol):
    """Gives the frames of one video."""

    @property
    def starts_s(self) -> Sequence[float]:
        """Returns when each is shown, seconds, and at last when the last one ends."""
        ...

    @property
    def size(self) -> Size:
        """Returns (height, width), upright."""
        ...

    def step_to(self, place: int) -> bool:
        """Works for a moment on a frame. Returns whether it can be had now. Raises MediaError."""
        ...

    def pixels(self, place: int) -> UInt8Array:
        """Returns that frame, uint8 [H, W, 3], upright. Raises MediaError."""
        ...


class ListedPictures:
    """The frames that a client has listed."""

    def __init__(self, media: Media, background: Colour) -> None:
        """Finds the frames. Raises MediaError."""
        self._frames = FrameList(media)
        self._background = background
        self.starts_s = [place / LIST_FPS for place in range(len(self._frames) + 1)]

    @property
    def size(self) -> Size:
        return upright_size(self._frames.frame(0))

    def step_to(self, place: int) -> bool:  # noqa: ARG002 - any frame can be had at once
        return True

    def pixels(self, place: int) -> UInt8Array:
        return load_image(self._frames.frame(place), background=self._background)


class AnimatedPictures:
    """The frames of an animated picture. They are asked for in any order, and drawn in theirs."""

    def __init__(self, media: Media, animation: Animation, options: RunOptions, background: Colour) -> None:
        """Draws nothing yet. Raises MediaError."""
        check_animation(media.name, animation, options.limits)
        self._orientation = exif_orientation(media)
        self._animation = animation
        self._drawing = Drawing(media, animation, background)
        self.starts_s = animation.starts_s

    @property
    def size(self) -> Size:
        height, width = self._animation.height, self._animation.width
        return (width, height) if self._orientation in TURNED else (height, width)

    def step_to(self, place: int) -> bool:
        return self._drawing.draw_next(place)

    def pixels(self, place: int) -> UInt8Array:  # noqa: ARG002 - it is the one drawn last
        return upright_by_exif(self._drawing.pixels(), self._orientation)


class PictureRun:
    """Decodes the frames of one request, group by group; `close` stops it after the frame in work."""

    def __init__(self, pictures: Pictures, times_s: Sequence[float], options: RunOptions) -> None:
        """Decodes nothing yet."""
        self._pictures = pictures
        self._places = [frame_at(pictures.starts_s, time_s) for time_s in times_s]
        self._size = options.size
        self._bounds = list(pairwise((0, *accumulate(options.group_sizes))))
        self._index = 0  # of the next group
        self._last: tuple[int, UInt8Array] | None = None  # a frame may be wanted many times
        self._is_closed = False

    @property
    def frame_size(self) -> Size:
        """(height, width) of the result."""
        return self._size or self._pictures.size

    def next_group(self) -> FrameGroup | None:
        """Returns the next group; None after the last. Raises MediaError, CancelledError once closed."""
        if self._index >= len(self._bounds):
            return None
        start, stop = self._bounds[self._index]
        places = self._places[start:stop]
        data = np.stack([self._decoded(place) for place in places])
        pts_s = np.array([self._pictures.starts_s[place] for place in places], np.float64)
        group = FrameGroup(self._index, start, Frames(data, pts_s))
        self._index += 1
        return group

    def _decoded(self, place: int) -> UInt8Array:
        if self._last is None or self._last[0] != place:
            self._check_open()
            while not self._pictures.step_to(place):
                self._check_open()
            self._last = place, exact_resize(self._pictures.pixels(place), self._size)
        return self._last[1]

    def _check_open(self) -> None:
        if self._is_closed:
            raise CancelledError("decoding was stopped; ask again")

    def close(self) -> None:
        """Stops decoding; calling it again does nothing."""
        self._is_closed = True
