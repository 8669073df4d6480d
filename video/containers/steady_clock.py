"""Gives packets of a transport stream one clock where theirs starts again or leaps.

    dts, s     0  1  2  3 | 0  1  2        two recordings in one file, or an encoder that was started again
    steady     0  1  2  3 | 4  5  6        the next packet follows at the distance of the two before it

FFmpeg unrolls the wrap of a 33-bit clock, and passes every other jump on.
"""

from __future__ import annotations

from collections.abc import Iterator

from epd.video.sources.source import VideoPacket

# A pause on screen may be this long; what is longer is a jump. FFmpeg's programs draw the line there too.
MAX_STEP_S = 10.0
# Times of damaged or overlapping packets go back this far without the clock having been set.
MAX_STEP_BACK_S = 0.25


class SteadyClock:
    """Moves packets, in order of the file from its start, onto one clock."""

    def __init__(self) -> None:
        self._shift = 0
        self._last: int | None = None
        self._step = 0  # from one packet to the next, ticks

    def steadied(self, packets: Iterator[VideoPacket]) -> Iterator[VideoPacket]:
        """Yields the packets with their times moved. Raises what reading them raises."""
        for packet in packets:
            self._move(packet)
            yield packet

    def _move(self, packet: VideoPacket) -> None:
        dts = packet.dts
        if dts is None:  # of the first ones of NUT, whose pts go back
            self._shift_by(packet)
            return
        if self._last is not None:
            step = dts + self._shift - self._last
            if -MAX_STEP_BACK_S <= step * packet.time_base <= MAX_STEP_S:
                self._step = step or self._step
            else:
                self._shift += max(1, packet.duration or self._step) - step
        self._last = dts + self._shift
        self._shift_by(packet)

    def _shift_by(self, packet: VideoPacket) -> None:
        if self._shift:
            packet.dts = None if packet.dts is None else packet.dts + self._shift
            packet.pts = None if packet.pts is None else packet.pts + self._shift
