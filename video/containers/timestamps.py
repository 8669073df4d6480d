"""Gives decoded frames their times; a frame that comes twice or too early counts once, in its place."""

from __future__ import annotations

import heapq

from av.video.frame import VideoFrame

from epd.video.containers.info import VideoInfo
from epd.video.sources.source import VideoPacket


class FrameClock:
    """Gives each frame that comes out of a decoder its timestamp.

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
