"""Decodes frames that a client has listed, one image after another, each when its group is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from epd.errors import CancelledError
from epd.types import FrameGroup, Frames, UInt8Array
from video.containers.images import load_image, upright_size
from video.decoding.pixels import Size, exact_resize
from video.decoding.run import RunOptions
from video.sources.frame_list import LIST_FPS, FrameList
from video.sources.source import Media


class FrameListRun:
    """Decodes the frames of one request, group by group; `close` stops it after the frame in work."""

    def __init__(self, media: Media, times_s: Sequence[float], options: RunOptions) -> None:
        """Finds the frames. Raises MediaError."""
        self._frames = FrameList(media)
        self._places = [self._place(time_s) for time_s in times_s]
        self._size = options.size
        self._bounds = list(pairwise((0, *accumulate(options.group_sizes))))
        self._index = 0  # of the next group
        self._is_closed = False

    def _place(self, time_s: float) -> int:
        return min(max(0, math.floor(time_s * LIST_FPS)), len(self._frames) - 1)

    @property
    def frame_size(self) -> Size:
        """(height, width) of the result."""
        return self._size or upright_size(self._frames.frame(0))

    def next_group(self) -> FrameGroup | None:
        """Returns the next group; None after the last. Raises MediaError, CancelledError once closed."""
        if self._index >= len(self._bounds):
            return None
        start, stop = self._bounds[self._index]
        data = np.stack([self._decoded(place) for place in self._places[start:stop]])
        pts_s = np.array([place / LIST_FPS for place in self._places[start:stop]], np.float64)
        group = FrameGroup(self._index, start, Frames(data, pts_s))
        self._index += 1
        return group

    def _decoded(self, place: int) -> UInt8Array:
        if self._is_closed:
            raise CancelledError("decoding was stopped; ask again")
        return exact_resize(load_image(self._frames.frame(place)), self._size)

    def close(self) -> None:
        """Stops decoding; calling it again does nothing."""
        self._is_closed = True
