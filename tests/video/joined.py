"""Files put together from packets of others: clocks that start again, tracks that are longer or earlier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
from av.container import InputContainer

from tests.tiny_audio import tones, write_audio

SOUND_RATE = 16_000


def joined(source: Path, path: Path, shifts_s: Sequence[float], container: str | None = None) -> Path:
    """The pictures of a video once for each shift, that much later by their clock."""
    with av.open(str(path), "w", format=container) as out:
        stream = None
        for shift_s in shifts_s:
            with av.open(str(source)) as opened:
                stream = stream or out.add_stream_from_template(opened.streams.video[0])
                for packet in _later(opened, shift_s):
                    packet.stream = stream
                    out.mux(packet)
    return path


def beside_sound(source: Path, path: Path, *, picture_s: float, sound_s: float, seconds: float) -> Path:
    """The pictures of a video from `picture_s` on, and tones of so many seconds from `sound_s` on."""
    codec = {".mov": "pcm_s16le", ".flv": "aac", ".mkv": "flac", ".mp4": "flac"}.get(path.suffix, "mp2")
    tone = write_audio(path.with_suffix(".mka"), tones(seconds, SOUND_RATE), SOUND_RATE, codec)
    with av.open(str(source)) as seen, av.open(str(tone)) as heard, av.open(str(path), "w") as out:
        copies = [out.add_stream_from_template(each.streams[0]) for each in (seen, heard)]
        packets = [
            (packet.dts * packet.time_base, index, packet)
            for index, pair in enumerate(((seen, picture_s), (heard, sound_s)))
            for packet in _later(*pair)
        ]
        for _, index, packet in sorted(packets, key=lambda each: each[:2]):
            packet.stream = copies[index]
            out.mux(packet)
    return path


def _later(container: InputContainer, shift_s: float) -> Iterator[av.Packet]:
    for packet in container.demux(container.streams[0]):
        if packet.size and packet.pts is not None:
            ticks = int(shift_s / (packet.time_base or Fraction(1)))
            packet.pts, packet.dts = (
                packet.pts + ticks,
                (packet.pts if packet.dts is None else packet.dts) + ticks,
            )
            yield packet
