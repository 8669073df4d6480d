"""Runs one decoder: takes operations, gives wanted frames, notices damage."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import av.error
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from epd.video.containers.info import VideoInfo
from epd.video.decoding.reader import DecodeChunk
from epd.video.decoding.segment import Drain, Feed, Op, Show, StartRun
from epd.video.sources.source import VideoPacket

# Codecs whose decoders drop unwanted non-reference pictures unharmed. VP9 ignores it, AV1 loses frames.
SKIPPING_CODECS = frozenset({"h264", "hevc"})
# Codecs whose packets may hold no frame or two: only frames show what is on screen.
UNFAITHFUL_CODECS = frozenset({"vp8", "libvpx", "mpeg4", "msmpeg4v3", "msmpeg4v2", "h263", "vc1", "wmv3"})

PACKETS_BETWEEN_PAUSES = 4


@dataclass(frozen=True, slots=True)
class DecodedFrame:
    """The frame for a target.

    frame: None where no frame near the target could be decoded.
    is_unexplained: its own frame did not come out, and yet no damage was found. Its keyframe may have been
        none: with intra refresh, decoding takes some frames to settle.
    """

    target: int
    frame: VideoFrame | None
    pts: int
    is_substitute: bool
    is_unexplained: bool = False


class Resolver:
    """Matches decoded frames, which come in order of presentation, with the targets of one run."""

    def __init__(self, start: StartRun, is_strict: bool) -> None:
        self._start = start
        self._is_strict = is_strict
        self._pending: deque[Show] = deque()
        self._before: tuple[int, VideoFrame] | None = None  # the last good frame
        self._before_place = 0  # in decode order
        self._num_fed = 0
        self._order: dict[int, int] = {}  # pts: place in decode order
        self._keys: list[int] = []  # places of keyframes
        self._breaks: list[int] = []  # places where decoding went wrong

    @property
    def is_idle(self) -> bool:
        """Whether every target so far has its frame."""
        return not self._pending

    def expect(self, show: Show) -> Iterator[DecodedFrame]:
        """Add a target; its frame may have come out already."""
        if self._before is not None and self._before[0] == show.pts and not self._pending:
            yield DecodedFrame(show.target, self._before[1], self._before[0], False)
        else:
            self._pending.append(show)

    def fed(self, pts: int, is_key: bool) -> None:
        """Note a packet that is about to be decoded."""
        if is_key:
            self._keys.append(self._num_fed)
        self._order[pts] = self._num_fed
        self._num_fed += 1

    def failed(self) -> None:
        """Note that the packet fed last could not be decoded."""
        self._breaks.append(self._num_fed - 1)

    def push(self, pts: int, frame: VideoFrame) -> Iterator[DecodedFrame]:
        """Take the next frame."""
        if pts < self._start.pts:
            return
        place = self._order.pop(pts, self._num_fed)
        if frame.is_corrupt:
            self._breaks.append(place)
        is_good = not self._is_damaged(place, place)
        while self._pending and self._is_due(self._pending[0], pts):
            show = self._pending.popleft()
            if show.pts == pts and is_good:
                yield DecodedFrame(show.target, frame, pts, False)
            else:
                yield self._nearest(show, (pts, frame) if is_good else None, place)
        if is_good:
            self._before, self._before_place = (pts, frame), place

    def _is_due(self, show: Show, pts: int) -> bool:
        return pts > show.target if show.pts is None else pts >= show.pts

    def finish(self) -> Iterator[DecodedFrame]:
        """Settle the remaining targets: the decoder is empty."""
        while self._pending:
            yield self._nearest(self._pending.popleft(), None, self._num_fed)

    def _is_damaged(self, place: int, until: int) -> bool:
        """Returns whether decoding went wrong from the last keyframe before `place` on, in decode order."""
        if not self._breaks:
            return False
        key = self._keys[max(0, bisect_right(self._keys, place) - 1)] if self._keys else 0
        return any(key <= broken <= until for broken in self._breaks)

    def _nearest(self, show: Show, after: tuple[int, VideoFrame] | None, place: int) -> DecodedFrame:
        """Return a substitute for a frame that did not come out, or what is on screen if packets cannot say.

        place: of the frame that came instead, in decode order.
        """
        before = self._before
        is_unexplained = not self._breaks
        if before is None and after is None:
            return DecodedFrame(show.target, None, show.target, True, is_unexplained)
        is_first = before is None and self._start.is_file_start and not self._breaks
        if not self._is_strict or show.pts is None or is_first:
            pts, frame = before or after  # type: ignore[misc]
            is_damaged = self._is_damaged(self._before_place, place)
            return DecodedFrame(show.target, frame, pts, is_damaged and not is_first)
        candidates = [one for one in (before, after) if one is not None]
        pts, frame = min(candidates, key=lambda one: abs(one[0] - show.target))
        return DecodedFrame(show.target, frame, pts, True, is_unexplained)


class DecoderSession:
    """A single-threaded decoder that is used for one run after another."""

    def __init__(self, context: VideoCodecContext, info: VideoInfo) -> None:
        self._context = context
        self._can_skip = context.name in SKIPPING_CODECS
        self._is_strict = context.name not in UNFAITHFUL_CODECS
        self._resolver = Resolver(StartRun(0, True), self._is_strict)
        self._clock = FrameClock(info)
        self._is_full = True
        self._ops: Iterator[Op[VideoPacket]] = iter(())

    @property
    def is_idle(self) -> bool:
        """Whether no target waits for a frame of this decoder."""
        return self._resolver.is_idle

    def run(self, chunk: DecodeChunk) -> Iterator[DecodedFrame | None]:
        """Do the operations; None marks the points between packets at which the work may be paused."""
        self._ops = iter(chunk.ops)
        for place, op in enumerate(self._ops):
            yield from self._do(op)
            if place % PACKETS_BETWEEN_PAUSES == 0:
                yield None

    def abandon(self) -> Iterator[DecodedFrame]:
        """Abandon the run: each target left gets the nearest frame."""
        self._resolver.failed()
        for op in self._ops:
            if isinstance(op, Show):
                yield from self._resolver.expect(op)
        yield from self._resolver.finish()
        self._context.flush_buffers()

    def _do(self, op: Op[VideoPacket]) -> Iterator[DecodedFrame]:
        if isinstance(op, StartRun):
            self._context.flush_buffers()
            self._resolver = Resolver(op, self._is_strict)
        elif isinstance(op, Show):
            yield from self._resolver.expect(op)
        elif isinstance(op, Feed):
            yield from self._feed(op)
        elif isinstance(op, Drain):
            yield from self._emit(self._decode(None))
            yield from self._resolver.finish()
            self._context.flush_buffers()

    def _feed(self, op: Feed[VideoPacket]) -> Iterator[DecodedFrame]:
        if self._can_skip and op.full != self._is_full:
            self._context.skip_frame = "DEFAULT" if op.full else "NONREF"
            self._is_full = op.full
        self._resolver.fed(op.stamp.pts, op.stamp.is_key)
        yield from self._emit(self._decode(op.stamp.packet))

    def _decode(self, packet: VideoPacket | None) -> list[VideoFrame]:
        self._clock.fed(packet)
        try:
            return self._frames(packet)
        except av.error.FFmpegError:
            self._clock.failed()
            self._resolver.failed()
            return []

    def _frames(self, packet: VideoPacket | None) -> list[VideoFrame]:
        """Returns what the decoder gives for a packet. Raises FFmpegError for damage."""
        return self._context.decode(packet)

    def _emit(self, frames: list[VideoFrame]) -> Iterator[DecodedFrame]:
        for frame in frames:
            pts = self._clock.pts(frame)
            if pts is not None:
                yield from self._resolver.push(pts, frame)


class FrameClock:
    """Gives each frame that comes out of a decoder its timestamp; one that comes twice counts once.

    Usually this is the frame's own, that of its packet. AVI numbers packets in decode order, so where a
    codec hides the order on screen, the n-th frame that comes out has the n-th smallest number.
    """

    def __init__(self, info: VideoInfo) -> None:
        self._fed: list[int] | None = [] if info.has_hidden_order else None
        self._last_fed: VideoPacket | None = None
        self._may_repeat = info.codec == "mpeg4"
        self._may_be_early = self._may_repeat and info.is_without_pts
        self._last: VideoFrame | None = None  # held, so that no other frame gets its memory

    def fed(self, packet: VideoPacket | None) -> None:
        """Note a packet that is about to be decoded; None: the decoder is being emptied."""
        self._last_fed = packet
        if self._fed is not None and packet is not None and packet.pts is not None:
            heapq.heappush(self._fed, packet.pts)

    def failed(self) -> None:
        """Note that the packet fed last gives no frame, so that those after it keep their times."""
        if self._fed and self._last_fed is not None and self._last_fed.pts in self._fed:
            self._fed.remove(self._last_fed.pts)
            heapq.heapify(self._fed)

    def pts(self, frame: VideoFrame) -> int | None:
        """Returns the timestamp of the next frame out; None for a frame that is not shown then."""
        if self._fed:
            return heapq.heappop(self._fed)
        is_extra = self._may_repeat and (self._is_early(frame) or self._is_repeated(frame))
        return None if is_extra else frame.pts

    def _is_early(self, frame: VideoFrame) -> bool:
        """Returns whether a B-picture that is shown before it may follow.

        Streams that do not say that they have B-pictures make libavcodec give the first reference before the
        B-pictures that it has yet to see, and again after them. Later packets are shown from the number of
        this one on: see `video/containers/avi_times.py`.
        """
        packet = self._last_fed
        if not self._may_be_early or packet is None or packet.dts is None or frame.pts is None:
            return False
        return frame.pts > packet.dts

    def _is_repeated(self, frame: VideoFrame) -> bool:
        """Returns whether the decoder, emptied after a picture that is not coded, repeats the last one."""
        before, self._last = self._last, frame
        return before is not None and before.planes[0].buffer_ptr == frame.planes[0].buffer_ptr
