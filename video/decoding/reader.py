"""Reads packets in file order, or from keyframe to keyframe where the container has an index.

One reader serves one request. It hands out chunks of decoder operations; a run that is longer than a chunk is
continued by the decoder that began it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import av.error
from av.packet import PacketSideData
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
# What a demuxer adds to the first packet alone of those it holds for: a new header, colours of a palette.
_SAID_ONCE: Final = ("new_extradata", "palette")


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Operations for one decoder, in order. ends_run: False where the same decoder must continue."""

    ops: list[Op[VideoPacket]]
    ends_run: bool


class _Packets:
    """Gives the packets of a video that have data, from where its container stands."""

    def __init__(self, video: OpenVideo, info: VideoInfo) -> None:
        self.video = video
        self._info = info
        self._clock = SteadyClock()
        self._packets = self._demux()
        self._num_errors = 0
        self._said: dict[str, PacketSideData] = {}  # last, of each kind

    def _demux(self) -> Iterator[VideoPacket]:
        packets = self.video.container.demux(self.video.stream)
        return timed(packets, self._info, self.video.stream.codec_context.extradata, self._clock)

    def next(self) -> VideoPacket | None:
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
                self._repeat(packet)
                return packet
        return None

    def _repeat(self, packet: VideoPacket) -> None:
        """Gives a keyframe what was said before it: its decoder may not have got those packets."""
        for kind in _SAID_ONCE:
            if packet.has_sidedata(kind):
                self._said[kind] = packet.get_sidedata(kind)
            elif packet.is_keyframe and kind in self._said:
                packet.set_sidedata(self._said[kind])

    def seek(self, position: int) -> bool:
        """Goes to a keyframe at or before a timestamp, if the container is right. False: it cannot."""
        if self._info.pixel_format == "pal8" and not self._said:
            self.next()  # the palette comes with the first packet, and never after a jump
        try:
            self.video.container.seek(position, stream=self.video.stream)
        except av.error.FFmpegError:
            return False
        self._packets = self._demux()
        return True

    def reopen(self, timeout_s: float) -> None:
        """Goes to the start of the file, which is opened again."""
        video = open_as_shown(self.video.media, timeout_s)
        self.video.close()
        self.video, self._clock, self._said = video, SteadyClock(), {}
        self._packets = self._demux()


class _Stamps:
    """Gives packets their times, in ticks.

    reorder: how far a keyframe is decoded before it is shown
    last_dts: of the last packet
    end_pts: the end of what was read
    """

    def __init__(self, reorder: int) -> None:
        self.reorder = reorder
        self.last_dts: int | None = None
        self.end_pts: int | None = None
        self._lateness = 0  # how far a faulty file decodes a packet after its time on screen

    def of(self, packet: VideoPacket) -> Stamp[VideoPacket]:
        """Returns a packet with its times."""
        pts, dts = packet.pts, packet.dts
        if pts is None:
            pts = (self.last_dts or 0) + 1 if dts is None else dts
        if dts is not None and packet.is_keyframe:
            self.reorder = max(self.reorder, pts - dts)
        self.last_dts = dts if dts is not None else pts - self.reorder
        self._lateness = max(self._lateness, 0 if dts is None else dts - pts)
        end_pts = pts + (packet.duration or 0)
        self.end_pts = end_pts if self.end_pts is None else max(self.end_pts, end_pts)
        bound = None if dts is None else dts - self._lateness
        return Stamp(pts, bound, packet.is_keyframe, packet.size, not packet.is_discard, packet)


class PacketReader:
    """Turns a file and wanted timestamps into chunks; not safe for use by two threads at once."""

    def __init__(
        self, video: OpenVideo, info: VideoInfo, targets: Sequence[int], workers: int, limits: Limits
    ) -> None:
        self.info = info
        self.cut_short: set[int] = set()  # targets that the file promises and does not hold
        self._limits = limits
        self._targets = targets
        self._index = info.keyframe_ticks_from_index or ()
        self._max_chunk_packets = MAX_CHUNK_PACKETS_ALONE if workers == 1 else MAX_CHUNK_PACKETS_SHARED
        fuse_packets = None if workers == 1 else FUSE_PACKETS
        self._plan: Segmenter[VideoPacket] | SequentialPlan[VideoPacket] = (
            SequentialPlan(targets)
            if info.has_hidden_order
            else Segmenter(targets, fuse_packets=fuse_packets)
        )
        self._packets = _Packets(video, info)
        self._jump_to: int | None = None
        self._considered: int | None = None
        self._min_jump_ticks = int(MIN_JUMP_S / info.time_base)
        self._landing: int | None = None
        self._steps_back = 0
        self._has_key = False
        self._stamps = _Stamps(max(0, info.start_pts - self._index[0]) if self._index else 0)
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
        return self._packets.video.stream.codec_context

    def close(self) -> None:
        """Close the container."""
        self._is_done = True
        self._packets.video.close()

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
        packet = self._packets.next()
        if packet is None:
            return self._finish()
        stamp = self._stamps.of(packet)
        if self._landing is not None and not self._has_landed(stamp):
            return None
        self._has_key |= stamp.is_key
        self._plan.push(stamp)
        self._consider_jump()
        if self._plan.next_target is None and not self._is_done:
            self._plan.cut()
            self._is_done = True
        return None

    def _consider_jump(self) -> None:
        """Leave the run if the index knows a keyframe far ahead and still before the next target."""
        target = self._plan.next_target
        if target is None or target == self._considered or not self._plan.is_settled or not self._index:
            return
        self._considered = target  # reading on only brings the keyframe nearer
        ahead = self._index[max(0, bisect_right(self._index, target - self._stamps.reorder) - 1)]
        here = self._index[0] if self._stamps.last_dts is None else self._stamps.last_dts
        if ahead - here > self._min_jump_ticks:
            self._plan.cut()
            self._jump_to = target

    def _seek(self, position: int) -> None:
        if not self._packets.seek(position):
            self._reopen()

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
        self._packets.reopen(self._limits.open_timeout_s)

    def _finish(self) -> None:
        if not self._has_key and isinstance(self._plan, Segmenter) and self._stamps.end_pts is not None:
            return self.restart_sequentially(self._targets)
        self._note_cut_short()
        self._plan.finish()
        self._is_done = True
        return None

    def _note_cut_short(self) -> None:
        """Remember the targets within the promised duration but after everything that could be read."""
        first, end_pts = self._plan.next_target, self._stamps.end_pts
        if first is None or end_pts is None:
            return
        slack = int(MAX_OVERRUN_S / self.info.time_base)
        promised = self.info.pts_at(self.info.duration_s)
        self.cut_short = {t for t in self._targets if t >= first and end_pts + slack < t < promised}
