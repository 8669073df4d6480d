"""Streams groups of frames from a media child, which others may use while nobody reads."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

from epd.errors import CancelledError, MediaError, UnavailableError
from epd.types import Frames
from epd.video.children.children import MediaChildren, attempted_twice, ended, nonsense
from epd.video.children.process import Child
from epd.video.children.wire import Header
from epd.video.decoding.pixels import Size
from epd.video.sources.local_files import OpenFile


class ChildStream:
    """Reads groups in order. Between reads its child decodes ahead, unless another stream needs the child.

        read           read                 (child taken away)   read: another child, from group 2 on
        | group 0 |----| group 1 |--- parked ---x                | group 2 |

    What children with a GPU do not give comes from spare ones, from that group on.
    For one reader at a time; `close` may come from any thread.
    """

    def __init__(
        self,
        children: MediaChildren,
        file: OpenFile,
        name: str,
        times_s: Sequence[float],
        size: Size,
        group_sizes: Sequence[int],
        spare: MediaChildren | None = None,
    ) -> None:
        """Takes over the file. See `video.stream`. spare: read on whatever becomes of `children`."""
        self._children, self._spare = children, spare
        self._file = file
        self._name = name
        self._times_s = tuple(times_s)
        self._size = size
        self._group_sizes = tuple(group_sizes)
        self._index = 0  # of the next group
        self._lock = threading.Lock()
        self._child: Child | None = None  # while it is being read
        self._is_closed = False

    @property
    def children(self) -> MediaChildren:
        """Those that read it now."""
        return self._children

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def read(self) -> Frames:
        """Returns the next group. Raises MediaError, UnavailableError, CancelledError."""
        if self._spare is not None:
            try:
                frames = self._read()
                self._children.failures.note(None)
                return frames
            except (MediaError, UnavailableError) as error:
                self._children.failures.note(error)
                with self._lock:
                    self._children, self._spare = self._spare, None
        return attempted_twice(self._read)

    def _read(self) -> Frames:
        child = self._children.unpark(self) or self._opened()
        self._hold(child)
        try:
            frames = self._next_group(child)
        except BaseException:
            self._let_go(child, is_over=True)
            raise
        self._index += 1
        self._let_go(child, is_over=False)
        return frames

    def _next_group(self, child: Child) -> Frames:
        shape = (self._group_sizes[self._index], *self._size, 3)
        pixels, descriptor = child.pixels_for(math.prod(shape))
        limit_s = self._children.limits.group_s
        reply = self._children.call(child, {"next": True}, self._name, limit_s, descriptor)
        try:
            pts_s = np.array(reply["pts_s"], np.float64)
            substituted = tuple(float(time_s) for time_s in reply["substituted_times_s"])
            return Frames(pixels.copy(shape), pts_s, substituted)
        except (KeyError, TypeError, ValueError) as error:
            raise nonsense() from error

    def _opened(self) -> Child:
        """Returns a child that has opened the stream at the next group."""
        child = self._children.take()
        limits = self._children.limits
        first = sum(self._group_sizes[: self._index])
        header: Header = {
            "job": "stream",
            "name": self._name,
            "cpu_s": limits.stream_cpu_s,
            "times_s": self._times_s[first:],
            "size": self._size,
            "group_sizes": self._group_sizes[self._index :],
            "background": self._children.background,
            "device": self._children.device,
        }
        self._hold(child)
        try:
            self._children.call(child, header, self._name, limits.group_s, self._file.descriptor)
        except BaseException:
            self._let_go(child, is_over=True)
            raise
        return child

    def _hold(self, child: Child) -> None:
        with self._lock:
            self._child = child
            is_closed = self._is_closed
        if is_closed:
            child.is_sound = False
            self._let_go(child, is_over=True)
            raise CancelledError(f"reading {self._name} was stopped; ask again")

    def _let_go(self, child: Child, *, is_over: bool) -> None:
        """Parks or returns the child. is_over: the job has ended by an error, or the child died."""
        with self._lock:
            self._child = None
            is_done = self._is_closed or self._index == len(self._group_sizes)
            if child.is_sound and not is_over and not is_done:
                return self._children.park(self, child)
        if is_over or not child.is_sound:
            return self._children.give_back(child)
        return self._children.give_back(ended(child))

    def close(self) -> None:
        """Stops decoding and any waiting `read`. Does not block; calling it again does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            child = self._child
            self._file.close()
        if child is not None:
            child.kill()
        elif (parked := self._children.unpark(self)) is not None:
            self._children.give_back(ended(parked))
