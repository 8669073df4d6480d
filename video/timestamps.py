"""True presentation times for containers that number packets as they are stored."""

from __future__ import annotations

import heapq

from av.video.frame import VideoFrame

from video.info import VideoInfo


class FrameClock:
    """Gives each decoded frame its timestamp.

    Where the container has presentation times this is the frame's own. AVI has none: FFmpeg numbers the
    packets in decode order, so the n-th frame that comes out, in order of presentation, has the n-th
    smallest number.
    """

    def __init__(self, info: VideoInfo) -> None:
        self._fed: list[int] | None = [] if info.has_pts_in_decode_order else None

    def fed(self, pts: int | None) -> None:
        """Note the timestamp of a packet that is about to be decoded."""
        if self._fed is not None and pts is not None:
            heapq.heappush(self._fed, pts)

    def pts(self, frame: VideoFrame) -> int | None:
        """The timestamp of the next frame out."""
        return heapq.heappop(self._fed) if self._fed else frame.pts
