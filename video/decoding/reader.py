"""Reads packets in file order, or from keyframe to keyframe where the container has an index.

One reader serves one request. It hands out chunks of decoder operations; a run that is longer than a chunk is
continued by the decoder that began it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import av.error
from av.video.codeccontext import VideoCodecContext

from epd.video.containers.avi_times import timed
from epd.video.containers.info import VideoInfo
from epd.video.containers.limits import Limits
from epd.video.containers.mp4_edits import open_as_shown
from epd.video.containers.steady_clock import SteadyClock
from epd.video.decoding.segment import Drain, Feed, Op, Segmenter, SequentialPlan, Stamp
from epd.video.sources.source import OpenVideo, VideoPacket

# Reading on over so much video is cheaper than seeking past it.
MIN_JUMP_S = 0.5
MAX_STEPS_BACK = 4
MAX_READ_ERRORS = 16
# A frame may stay on screen this much longer than the file says before it stands in for missing ones.
MAX_OVERRUN_S = 1.0
FUSE_PACKETS = 32
MAX_CHUNK_PACKETS_ALONE = 48
MAX_CHUNK_PACKETS_SHARED = 1024


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Operations for one decoder, in order. ends_run: False where the same decoder must continue."""

    ops: list[Op[VideoPacket]]
    ends_run: bool


class PacketReader:
    """Turns a file and wanted timestamps into chunks; not safe for use by two threads at once."""

    def __init__(
        self, video: OpenVideo, info: VideoInfo, targets: Sequence[int], workers: int, limits: Limits
    ) -> None:
        self.info = info
        self.cut_short: set[int] = set()  # targets that the file promises and does not hold
        self._video, self._limits = video, limits
        self._targets = targets
        self._index = info.keyframe_ticks_from_index or ()
        self._max_chunk_packets = MAX_CHUNK_PACKETS_ALONE if workers == 1 else MAX_CHUNK_PACKETS_SHARED
        fuse_packets = None if workers == 1 else FUSE_PACKETS
        self._plan: Segmenter[VideoPacket] | SequentialPlan[VideoPacket] = (
            SequentialPlan(targets)
            if info.has_hidden_order
            else Segmenter(targets, fuse_packets=fuse_packets)
        )
        self._clock = SteadyClock()
        self._packets = self._demux()
        self._jump_to: int | None = None
        self._considered: int | None = None
        self._min_jump_ticks = int(MIN_JUMP_S / info.time_base)
        self._landing: int | None = None
        self._steps_back = 0
        self._num_errors = 0
        self._last_dts: int | None = None
        self._end_pts: int | None = None
        self._lateness = 0  # how far, in ticks, a faulty file decodes a packet after its time on screen
        self._has_key = False
        self._reorder = max(0, self.info.start_pts - self._index[0]) if self._index else 0
        self._is_done = not targets
        self._consider_jump()

    @property
    def next_target(self) -> int | None:
        """The first wanted timestamp that is not in a chunk yet."""
        return None if self._is_done else self._plan.next_target

    @property
    def has_one_keyframe(self) -> bool:
        """Whether the container says that only the first frame can be decoded by itself."""
        return len(self._index) == 1 and self.info.num_frames > FUSE_PACKETS

    @property
    def is_sequential(self) -> bool:
        """Whether everything is decoded from the start of the file."""
        return isinstance(self._plan, SequentialPlan)

    def restart_sequentially(self, targets: Sequence[int]) -> None:
        """Decode the whole file in order for the remaining targets: keyframes are not what they seem."""
        self._targets, self._plan = targets, SequentialPlan(targets)
        self._jump_to, self._is_done = None, not targets
        self._reopen()

    def own_context(self) -> VideoCodecContext:
        """Returns the reader's own decoder, for a request that has only one: seeking resets it."""
        return self._video.stream.codec_context

    def close(self) -> None:
        """Close the container."""
        self._is_done = True
        self._video.close()

    def next_chunk(self) -> DecodeChunk | None:
        """Returns the next operations, or None when every wanted frame has been handed out."""
        ops = self._plan.ops
        num_fed = 0
        taken: list[Op[VideoPacket]] = []
        while True:
            while ops:
                taken.append(ops.popleft())
                num_fed += isinstance(taken[-1], Feed)
                if isinstance(taken[-1], Drain):
                    return DecodeChunk(taken, ends_run=True)
            if self._is_done:
                return DecodeChunk(taken, ends_run=True) if taken else None
            if num_fed >= self._max_chunk_packets:
                return DecodeChunk(taken, ends_run=False)
            self._advance()

    def _advance(self) -> None:
        """Read one packet, after the jump that is due."""
        if self._jump_to is not None:
            self._landing, self._jump_to = self._jump_to, None
            self._seek(self._landing)
        packet = self._read()
        if packet is None:
            return self._finish()
        stamp = self._stamp(packet)
        if self._landing is not None and not self._has_landed(stamp):
            return None
        self._has_key |= stamp.is_key
        self._plan.push(stamp)
        self._consider_jump()
        if self._plan.next_target is None and not self._is_done:
            self._plan.cut()
            self._is_done = True
        return None

    def _demux(self) -> Iterator[VideoPacket]:
        """Yields packets from the container's current position."""
        packets = self._video.container.demux(self._video.stream)
        return timed(packets, self.info, self._video.stream.codec_context.extradata, self._clock)

    def _read(self) -> VideoPacket | None:
        """Returns the next packet with data, or None at the end of what can be read."""
        while self._num_errors <= MAX_READ_ERRORS:
            try:
                packet = next(self._packets, None)
            except av.error.FFmpegError:
                self._num_errors += 1
                self._packets = self._demux()
                continue
            if packet is None or (packet.size == 0 and packet.dts is None):
                return None
            if packet.size:
                return packet
        return None

    def _stamp(self, packet: VideoPacket) -> Stamp[VideoPacket]:
        pts, dts = packet.pts, packet.dts
        if pts is None:
            pts = (self._last_dts or 0) + 1 if dts is None else dts
        if dts is not None and packet.is_keyframe:
            self._reorder = max(self._reorder, pts - dts)
        self._last_dts = dts if dts is not None else pts - self._reorder
        self._lateness = max(self._lateness, 0 if dts is None else dts - pts)
        end_pts = pts + (packet.duration or 0)
        self._end_pts = end_pts if self._end_pts is None else max(self._end_pts, end_pts)
        bound = None if dts is None else dts - self._lateness
        return Stamp(pts, bound, packet.is_keyframe, packet.size, not packet.is_discard, packet)

    def _consider_jump(self) -> None:
        """Leave the run if the index knows a keyframe far ahead and still before the next target."""
        target = self._plan.next_target
        if target is None or target == self._considered or not self._plan.is_settled or not self._index:
            return
        self._considered = target  # reading on only brings the keyframe nearer
        ahead = self._index[max(0, bisect_right(self._index, target - self._reorder) - 1)]
        here = self._index[0] if self._last_dts is None else self._last_dts
        if ahead - here > self._min_jump_ticks:
            self._plan.cut()
            self._jump_to = target

    def _seek(self, position: int) -> None:
        """Go to a keyframe at or before a timestamp, if the container is right about it."""
        try:
            self._video.container.seek(position, stream=self._video.stream)
        except av.error.FFmpegError:
            self._reopen()
        self._packets = self._demux()

    def _has_landed(self, stamp: Stamp[VideoPacket]) -> bool:
        """Returns whether the first keyframe after a seek is early enough; if not, seek again, earlier."""
        if not stamp.is_key or self._landing is None:
            return False
        if stamp.pts <= self._landing:
            self._landing, self._steps_back = None, 0
            return True
        self._steps_back += 1
        if self._steps_back > MAX_STEPS_BACK:
            self._reopen()
        else:
            self._seek((stamp.pts if stamp.dts is None else stamp.dts) - 4**self._steps_back)
        return False

    def _reopen(self) -> None:
        """Read the whole file from its start instead: the index is wrong."""
        self._index, self._landing = (), None
        self._plan.begin(is_file_start=True)
        video = open_as_shown(self._video.media, self._limits.open_timeout_s)
        self._video.close()
        self._video, self._clock = video, SteadyClock()
        self._packets = self._demux()

    def _finish(self) -> None:
        if not self._has_key and isinstance(self._plan, Segmenter) and self._end_pts is not None:
            return self.restart_sequentially(self._targets)
        self._note_cut_short()
        self._plan.finish()
        self._is_done = True
        return None

    def _note_cut_short(self) -> None:
        """Remember the targets within the promised duration but after everything that could be read."""
        first = self._plan.next_target
        if first is None or self._end_pts is None:
            return
        slack = int(MAX_OVERRUN_S / self.info.time_base)
        promised = self.info.pts_at(self.info.duration_s)
        self.cut_short = {t for t in self._targets if t >= first and self._end_pts + slack < t < promised}
