"""Reads streams of videos: frames of single groups on demand, decoded ahead of ordered requests.

groups of the item   |  0  |  1  |  2  |  3  |  4  |
requested               ^           ^     ^           the stream starts at the first and skips the others
requested again         ^                             groups behind the stream are decoded separately
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from epd import video
from epd.control.decoders import THREADS_OF_A_GPU, DecoderLoad, soonest
from epd.errors import CancelledError, UnavailableError
from epd.machine import usable_cpus
from epd.serve_app.media_messages import CloseStream, DecodeOrder, ReadFrames
from epd.serve_app.messages import Message
from epd.types import Frames, UInt8Array

# Names of closed streams are kept for reads that were sent before the close and run after it.
_MAX_CLOSED = 4096


class FrameStream(Protocol):
    """Provides the decoded groups of one video, in order."""

    def read(self) -> Frames:
        """Returns the next group. Blocks until it is decoded. Raises MediaError, CancelledError."""
        ...

    def close(self) -> None:
        """Stops decoding, and any waiting `read`. Does not block."""
        ...


# Starts decoding. May block. Raises MediaError.
Opener = Callable[[DecodeOrder], FrameStream]


@dataclass(slots=True)
class _Stream:
    """One item of a request.

    order: of all groups
    next_index: of the group that comes next from `groups`, which is None until opened
    lock: held by the thread that opens and reads
    """

    order: DecodeOrder
    next_index: int
    groups: FrameStream | None = None
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FrameReader:
    """Reads streams of any number of items, each one group at a time. May be used by several threads."""

    def __init__(self, opener: Opener) -> None:
        """Starts without streams."""
        self._open = opener
        self._streams: dict[str, _Stream] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._began_s: dict[int, float] = {}  # of reads in progress, by thread

    def handle(self, message: Message[Any]) -> tuple[int | None, UInt8Array | None]:
        """Returns the reply, and its bulk for ReadFrames. Blocks until decoded. Raises MediaError."""
        match message:
            case ReadFrames():
                frames = self._timed(message)
                return frames.num_substituted, frames.data
            case CloseStream():
                self.close_stream(message.stream_id)
                return None, None
            case _:
                raise TypeError(f"a video decoder takes no {type(message).__name__}")

    def _timed(self, message: ReadFrames) -> Frames:
        thread = threading.get_ident()
        self._began_s[thread] = time.monotonic()
        try:
            return self._read(message)
        finally:
            del self._began_s[thread]

    @property
    def busy_s(self) -> float:
        """Returns seconds that the oldest read in progress has taken; 0 without any."""
        return max(0.0, time.monotonic() - min(list(self._began_s.values()), default=math.inf))

    def _read(self, message: ReadFrames) -> Frames:
        stream = self._stream_of(message)
        with stream.lock:
            if message.index < stream.next_index:
                return self._alone(stream.order, message.index)
            groups = stream.groups or self._opened(stream, message.stream_id)
            while True:
                frames = groups.read()
                stream.next_index += 1
                if stream.next_index > message.index:
                    return frames

    def _stream_of(self, message: ReadFrames) -> _Stream:
        with self._lock:
            if message.stream_id in self._closed:
                raise _closed(message.stream_id)
            if message.stream_id not in self._streams:
                if message.order is None:
                    raise UnavailableError(f"stream '{message.stream_id}' is not open here; open another")
                self._streams[message.stream_id] = _Stream(message.order, message.index)
            return self._streams[message.stream_id]

    def _opened(self, stream: _Stream, stream_id: str) -> FrameStream:
        """Opens the groups of a stream, which may be closed meanwhile."""
        groups = self._open(stream.order.groups(stream.next_index))
        with self._lock:
            if not stream.is_closed:
                stream.groups = groups
                return groups
        groups.close()
        raise _closed(stream_id)

    def _alone(self, order: DecodeOrder, index: int) -> Frames:
        """Decodes one group that is behind the stream."""
        groups = self._open(order.groups(index, index + 1))
        try:
            return groups.read()
        finally:
            groups.close()

    def close_stream(self, stream_id: str) -> None:
        """Closes a stream without blocking on the threads that read."""
        with self._lock:
            stream = self._streams.pop(stream_id, None)
            self._closed[stream_id] = None
            if len(self._closed) > _MAX_CLOSED:
                self._closed.popitem(last=False)
            if stream is None:
                return
            stream.is_closed = True
            groups = stream.groups
        if groups is not None:
            groups.close()

    def close(self) -> None:
        """Stops all decoding."""
        for stream_id in list(self._streams):
            self.close_stream(stream_id)

    def __len__(self) -> int:
        """Returns the number of open streams."""
        return len(self._streams)


def _closed(stream_id: str) -> CancelledError:
    return CancelledError(f"stream '{stream_id}' is closed; open another")


# Starts decoding an open file, which it takes over. Its name in errors, and its pixels on the way to the last
# frame that is wanted. Raises MediaError.
Decoder = Callable[[video.OpenFile, str, DecodeOrder, float], FrameStream]


class _StreamHere:
    """Decodes in threads of this process. Raises MediaError."""

    def __init__(self, file: video.OpenFile, name: str, order: DecodeOrder) -> None:
        self._file = file
        try:
            media = video.Media(file.source, name)
            self._groups = video.stream(media, order.times_s, order.size, group_sizes=order.group_sizes)
        except BaseException:
            file.close()
            raise

    def read(self) -> Frames:
        return next(self._groups).frames

    def close(self) -> None:
        self._groups.close()
        self._file.close()


def stream_here(file: video.OpenFile, name: str, order: DecodeOrder, _pixels: float = 0.0) -> FrameStream:
    """Decodes in threads of this process. Raises MediaError."""
    return _StreamHere(file, name, order)


class ChildDecoder:
    """Decodes videos in children of the CPU and of a GPU, each where it is through first. For any thread."""

    def __init__(self, of_cpu: video.MediaChildren, of_gpu: video.MediaChildren | None = None) -> None:
        """of_gpu: each reads a video at a time; what they cannot is left to the CPU's."""
        self._of_cpu, self._of_gpu = of_cpu, of_gpu
        self._videos: list[tuple[video.ChildStream, float]] = []  # that may be open, and their pixels
        self._lock = threading.Lock()

    def __call__(self, file: video.OpenFile, name: str, order: DecodeOrder, pixels: float) -> FrameStream:
        what = (order.times_s, order.size, order.group_sizes)
        if self._of_gpu is None:
            return video.ChildStream(self._of_cpu, file, name, *what)
        with self._lock:
            self._videos = [each for each in self._videos if not each[0].is_closed]
            places = self._places(self._of_gpu)
            chosen = places[soonest([load for _, load in places], pixels)][0]
            spare = None if chosen is self._of_cpu else self._of_cpu
            self._videos.append((video.ChildStream(chosen, file, name, *what, spare), pixels))
            return self._videos[-1][0]

    def _places(self, of_gpu: video.MediaChildren) -> list[tuple[video.MediaChildren, DecoderLoad]]:
        """Returns those that can take a video, the CPU first."""
        places = [(self._of_cpu, DecoderLoad(usable_cpus(), sum(self._pixels(self._of_cpu))))]
        if not of_gpu.failures.are_too_many:
            work = self._pixels(of_gpu)
            if len(work) < of_gpu.limits.max_children:
                places.append((of_gpu, DecoderLoad(THREADS_OF_A_GPU, sum(work))))
        return places

    def _pixels(self, children: video.MediaChildren) -> list[float]:
        return [pixels for stream, pixels in self._videos if stream.children is children]
