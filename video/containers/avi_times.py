"""Gives AVI the presentation times it lacks, from the place and kind of each packet.

AVI only numbers its chunks; FFmpeg gives the number as dts and guesses the rest. Each chunk is one tick of
the frame rate, and the n-th frame in order of display is shown from tick n on:

    chunk (dts)      0   1   2   3   4   5   6
    plain            I0  P3  B1  B2  P6  B4  B5    a B-picture is shown a tick before its own chunk,
    shown at         0   3   1   2   6   4   5     a reference when the B-pictures after it are over
    packed           I0 P3+B1 B2  N P6+B4 B5  N    the decoder keeps B1 for the next packet, B2 for N,
    which gives      I0  P3  B1  B2  P6  B4  B5    so that its frames are those of a plain file

What is not coded (N where nothing is kept) shows what was on screen before it; so does a chunk without data,
which leaves a gap in the numbers. Pictures of H.264, HEVC and VC-1 do not show their kind this simply: only
decoding gives their order (`FrameClock`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import av.error

from epd.video.containers.info import VideoInfo
from epd.video.containers.steady_clock import SteadyClock
from epd.video.sources.source import VideoPacket

IsB = Callable[[bytes], bool]

# Packets that are held for the reference picture after them: more B-pictures in a row are no encoder's.
MAX_HELD = 64

_START_CODE_SIZE = 4
_VOP, _MPEG_PICTURE = b"\0\0\1\xb6", b"\0\0\1\0"
_VOP_B, _MPEG_B = 2, 3
_MPEG_CODECS = frozenset({"mpeg1video", "mpeg2video"})
_ENCODER = re.compile(rb"DivX\d+(?:Build|b)\d+(p?)")


class Mpeg4Pictures:
    """Says of each packet of MPEG-4 part 2, in order, whether the decoder makes a B-VOP of it.

    It follows libavcodec: in a stream that names a packing encoder, the second VOP of a packet is kept and
    decoded in place of what the next packet begins with.
    """

    def __init__(self, extradata: bytes) -> None:
        self._is_packed = False
        self._has_kept = False
        self._note_encoder(extradata)

    def is_b(self, data: bytes) -> bool:
        """Returns whether the picture of the next packet is a B-VOP."""
        places = _places(data, _VOP)
        self._note_encoder(data[: places[0]] if places else data)
        types = [data[place + _START_CODE_SIZE] >> 6 for place in places]
        is_b = self._has_kept or types[:1] == [_VOP_B]
        later = types if self._has_kept else types[1:]
        self._has_kept = self._is_packed and later[:1] == [_VOP_B]
        return is_b

    def _note_encoder(self, headers: bytes) -> None:
        found = _ENCODER.search(headers)
        if found is not None:
            self._is_packed = found[1] == b"p"


def is_mpeg_b(data: bytes) -> bool:
    """Returns whether a packet of MPEG-1 or MPEG-2 holds a B-picture."""
    place = data.find(_MPEG_PICTURE)
    return 0 <= place < len(data) - 5 and data[place + 5] >> 3 & 7 == _MPEG_B


def _places(data: bytes, start_code: bytes) -> list[int]:
    """Returns where the first two start codes are that something follows."""
    first = data.find(start_code, 0, len(data) - 1)
    second = data.find(start_code, first + _START_CODE_SIZE, len(data) - 1) if first >= 0 else -1
    return [place for place in (first, second) if place >= 0]


class DisplayTimes:
    """Gives packets, in order of decoding, their presentation times as soon as these are known."""

    def __init__(self, is_b: IsB | None, *, has_clock: bool = False) -> None:
        """Begins without a packet.

        is_b: None where frames are shown in the order of decoding, or in one that only decoding tells.
        has_clock: whether packets have times of decoding. A B-picture gets that of the packet before it.
        """
        self._is_b, self._has_clock = is_b, has_clock
        self._held: list[VideoPacket] = []  # a reference and the B-pictures after it
        self._last_dts = -1

    def push(self, packet: VideoPacket) -> Iterator[VideoPacket]:
        """Take the next packet; packets that have their time now come out."""
        dts = self._last_dts + 1 if packet.dts is None else packet.dts
        before = self._last_dts if self._has_clock else dts - 1
        packet.dts = packet.pts = self._last_dts = dts
        if self._is_b is None:
            yield packet
        elif not self._is_b(bytes(packet)):
            yield from self.finish()
            self._held.append(packet)
        else:
            packet.pts = before
            self._held.append(packet)
            if len(self._held) == 1 or len(self._held) > MAX_HELD:
                yield from self.finish()

    def finish(self) -> Iterator[VideoPacket]:
        """Yields the held packets, once a reference picture or the end of the file follows."""
        held, self._held = self._held, []
        if len(held) > 1:
            held[0].pts = held[-1].dts
        yield from held


class ProgramTimes(DisplayTimes):
    """Mends times of MPEG-1 and MPEG-2 in a program stream, of which FFmpeg would show two pictures at once.

    Some pictures have a time in the file. A picture whose start code is cut in two gets that of the one after
    it, and pictures without a time follow. None is decoded before the one in front of it, and a reference is
    shown after the B-pictures that are decoded after it.
    """

    def __init__(self) -> None:
        super().__init__(is_mpeg_b)

    def push(self, packet: VideoPacket) -> Iterator[VideoPacket]:
        """Take the next packet; packets that have their time now come out."""
        if packet.dts is None:
            yield from self.finish()
            yield packet
            return
        if self._last_dts >= packet.dts:
            packet.dts = self._last_dts + max(1, packet.duration or 0)
        self._last_dts = packet.dts
        if is_mpeg_b(bytes(packet)):
            packet.pts = packet.dts
        else:
            yield from self.finish()
        self._held.append(packet)
        if len(self._held) > MAX_HELD:
            yield from self.finish()

    def finish(self) -> Iterator[VideoPacket]:
        """Yields the held packets, once a reference picture or the end of the file follows."""
        held, self._held = self._held, []
        if len(held) > 1 and held[-1].dts is not None and (held[0].pts or 0) <= held[-1].dts:
            held[0].pts = held[-1].dts + max(1, held[-1].duration or 0)
        yield from held


def timed(
    packets: Iterator[VideoPacket], info: VideoInfo, extradata: bytes | None, clock: SteadyClock
) -> Iterator[VideoPacket]:
    """Yields the packets with true presentation times: those of AVI, ASF and raw streams are made here, those
    of program streams mended; clocks that jump are steadied, others are as the file has them.

    packets: as demuxed from the start or from a keyframe on. clock: that of the packets before them.
    Raises what reading them raises.
    """
    packets = clock.steadied(packets) if info.may_jump else packets
    if info.is_without_pts:
        numbered = _unnumbered(packets) if info.is_raw else packets
        return _timed(numbered, DisplayTimes(_kinds(info, extradata), has_clock=not info.is_numbered))
    is_program = info.container_format == "mpeg" and info.codec in _MPEG_CODECS
    return _timed(packets, ProgramTimes()) if is_program else packets


def _unnumbered(packets: Iterator[VideoPacket]) -> Iterator[VideoPacket]:
    """Drops what FFmpeg guesses of the times of a raw stream."""
    for packet in packets:
        packet.dts = packet.pts = None
        packet.duration = 1
        yield packet


def _kinds(info: VideoInfo, extradata: bytes | None) -> IsB | None:
    if info.codec == "mpeg4":
        return Mpeg4Pictures(extradata or b"").is_b
    return is_mpeg_b if info.codec in _MPEG_CODECS else None


def _timed(packets: Iterator[VideoPacket], times: DisplayTimes) -> Iterator[VideoPacket]:
    try:
        for packet in packets:
            if packet.size:
                yield from times.push(packet)
            elif packet.dts is None:  # it marks the end of the stream
                yield from times.finish()
                yield packet
    except av.error.FFmpegError:
        yield from times.finish()
        raise
    yield from times.finish()
