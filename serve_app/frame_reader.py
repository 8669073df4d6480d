"""The video decoder as a worker: frames of single groups on demand, decoded ahead while asked for in order.

cuts of the item     |  0  |  1  |  2  |  3  |  4  |
asked for               ^           ^     ^           the stream starts at the first, skips what is not asked
asked for again         ^                             what lies behind the stream is decoded by itself
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import video
from encoders import MediaPlan
from epd.errors import CancelledError
from epd.types import Frames, UInt8Array
from serve_app.messages import CloseStream, Message, ReadFrames

# Names of closed streams are kept for what was sent before and is carried out after.
_MAX_CLOSED = 4096


@dataclass(slots=True)
class _Stream:
    """next_index: of the group that the stream gives next."""

    groups: video.GroupStream
    next_index: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class FrameReader:
    """Streams of any number of items, each asked for one group at a time. May be used by several threads."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def handle(self, message: Message[Any]) -> tuple[int | None, UInt8Array | None]:
        """The reply, and its bulk for ReadFrames. Blocks until frames are there. Raises MediaError."""
        match message:
            case ReadFrames():
                frames = self._read(message)
                return frames.num_substituted, frames.data
            case CloseStream():
                self._close(message.stream_id)
                return None, None
            case _:
                raise TypeError(f"a video decoder takes no {type(message).__name__}")

    def _read(self, message: ReadFrames) -> Frames:
        stream = self._stream_of(message)
        with stream.lock:
            if message.index < stream.next_index:
                return _alone(message)
            while True:
                frames = next(stream.groups).frames
                stream.next_index += 1
                if stream.next_index > message.index:
                    return frames

    def _stream_of(self, message: ReadFrames) -> _Stream:
        with self._lock:
            if message.stream_id in self._closed:
                raise CancelledError(f"stream '{message.stream_id}' is closed; open another")
            stream = self._streams.get(message.stream_id)
            if stream is None:
                stream = self._streams[message.stream_id] = _Stream(_opened(message), message.index)
            return stream

    def _close(self, stream_id: str) -> None:
        with self._lock:
            stream = self._streams.pop(stream_id, None)
            self._closed[stream_id] = None
            if len(self._closed) > _MAX_CLOSED:
                self._closed.popitem(last=False)
        if stream is not None:
            stream.groups.close()

    def close(self) -> None:
        """Stops all decoding."""
        for stream_id in list(self._streams):
            self._close(stream_id)

    def __len__(self) -> int:
        """Streams that are open."""
        return len(self._streams)


def _opened(message: ReadFrames) -> video.GroupStream:
    cuts = message.cuts[message.index :]
    sizes = [_num_frames(message.plan, start, stop) for start, stop in cuts]
    first = cuts[0][0] * message.plan.frames_per_unit
    return video.stream(_media(message), message.plan.times_s[first:], message.plan.size, group_sizes=sizes)


def _alone(message: ReadFrames) -> Frames:
    start, stop = message.cuts[message.index]
    first = start * message.plan.frames_per_unit
    times = message.plan.times_s[first : first + _num_frames(message.plan, start, stop)]
    return video.decode(_media(message), times, message.plan.size)


def _media(message: ReadFrames) -> video.Media:
    return video.Media(message.source, message.name)


def _num_frames(plan: MediaPlan, start: int, stop: int) -> int:
    """Frames of units [start, stop); the last unit may be short."""
    return min(stop * plan.frames_per_unit, plan.num_frames) - start * plan.frames_per_unit
