"""Encodes clips whose frames show their time, in many containers, codecs and rates."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

import av
import numpy as np

from benchmarks.witness.timecode import HEIGHT, HIDDEN_MS, WIDTH, draw
from epd.types import UInt8Array
from tests.scheduling import as_before

_SAMPLES = 1024  # of a frame of sound
TICK = Fraction(1, 1000)  # seconds; of clips of variable rate
# Container: codec of sound, its samples per second.
_SOUND = {
    "webm": ("libopus", 48_000),
    "avi": ("pcm_s16le", 16_000),
    "mpg": ("mp2", 16_000),
    "ogv": ("libopus", 48_000),
    "mxf": ("pcm_s16le", 48_000),
}
_AAC = ("aac", 16_000)


@dataclass(frozen=True, slots=True)
class Encoding:
    """Says how frames are encoded. structure: what is special about it, for people."""

    codec: str
    structure: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    pixel_format: str = "yuv420p"


@dataclass(frozen=True)
class Clip:
    """Describes a clip.

    container: the ending of its file, muxer: FFmpeg's name of what writes it
    gaps_s: between the frames, in turn
    num_frames: that are stored
    shown: runs [start, stop) of stored frames that are shown, the others hidden by the finish; empty for all
    start_s: when its first stored frame is shown by the clock of the container
    sound: from when to when there is sound, seconds by the clock of the container
    kind: what is special about it, for people
    is_piped: whether it is written to a file that cannot seek
    finish: changes the file as it was written, and says what is shown then
    """

    container: str
    muxer: str
    encoding: Encoding
    gaps_s: tuple[Fraction, ...]
    num_frames: int
    shown: tuple[tuple[int, int], ...] = ()
    start_s: Fraction = Fraction(0)
    sound: tuple[float, float] | None = None
    rotation_deg: int = 0
    kind: str = "plain"
    container_options: Mapping[str, str] = field(default_factory=dict)
    is_piped: bool = False
    finish: Callable[[Path, Clip], Clip] | None = None

    @property
    def name(self) -> str:
        parts = (self.kind, self.encoding.codec, self.encoding.structure, self.rate)
        return (
            f"{self.container}: {', '.join(part for part in parts if part)}, {float(self.duration_s):.1f} s"
        )

    @property
    def is_variable(self) -> bool:
        return len(self.gaps_s) > 1

    @property
    def rate(self) -> str:
        return "variable" if self.is_variable else f"{float(1 / self.gaps_s[0]):.5g}"

    @property
    def rate_per_s(self) -> float:
        """Returns the mean rate of what is shown."""
        return float(self.num_shown / self.duration_s)

    @cached_property
    def stored_s(self) -> list[Fraction]:
        """Returns when each stored frame begins, and the end of the last; 0 is the first."""
        return list(accumulate(islice(cycle(self.gaps_s), self.num_frames), initial=Fraction(0)))

    @cached_property
    def indices(self) -> list[int]:
        """Returns the stored frames that are shown."""
        return [
            index for start, stop in self.shown or ((0, self.num_frames),) for index in range(start, stop)
        ]

    @property
    def num_shown(self) -> int:
        return len(self.indices)

    @cached_property
    def edges_s(self) -> list[Fraction]:
        """Returns when each frame that is shown begins, and the end of the last; 0 is the first."""
        lengths = (self.stored_s[index + 1] - self.stored_s[index] for index in self.indices)
        return list(accumulate(lengths, initial=Fraction(0)))

    @property
    def duration_s(self) -> Fraction:
        """Returns how long it is shown."""
        return self.edges_s[-1]

    @property
    def shown_ms(self) -> list[int]:
        """Returns what each frame that is shown has drawn into it."""
        return [round(edge * 1000) for edge in self.edges_s[:-1]]

    @property
    def drawn_ms(self) -> list[int]:
        """Returns what each stored frame has drawn into it."""
        drawn = [HIDDEN_MS + round(edge * 1000) for edge in self.stored_s[:-1]]
        for index, time_ms in zip(self.indices, self.shown_ms, strict=True):
            drawn[index] = time_ms
        return drawn

    def on_screen(self, time_s: float) -> int:
        """Returns the frame on screen at a time: the last that has begun, or the first."""
        return min(max(bisect_right(self.edges_s, time_s) - 1, 0), self.num_shown - 1)


def write(clip: Clip, path: Path, drawn_ms: Sequence[int] | None = None) -> Clip:
    """Encodes a clip, and returns what it is then. drawn_ms: into its frames, by default the right times."""
    sink: Any = _Pipe(path) if clip.is_piped else str(path)
    options = dict(clip.container_options)
    with as_before(), av.open(sink, "w", format=clip.muxer, options=options) as container:
        video = _video_stream(container, clip)
        sound = _Sound(container, clip) if clip.sound else None
        clock = TICK if clip.is_variable else clip.gaps_s[0]
        for edge, time_ms in zip(clip.stored_s[:-1], drawn_ms or clip.drawn_ms, strict=True):
            shown_s = clip.start_s + edge
            frame = av.VideoFrame.from_ndarray(_planes(draw(time_ms), clip.rotation_deg), "yuv420p")
            frame.time_base, frame.pts = clock, round(shown_s / clock)
            container.mux(video.encode(_as(frame, clip.encoding.pixel_format)))
            if sound:
                sound.until(float(shown_s))
        container.mux(video.encode())
        if sound:
            sound.close()
    if clip.is_piped:
        sink.close()
    return clip.finish(path, clip) if clip.finish else clip


def _video_stream(container: Any, clip: Clip) -> Any:
    mean_rate = (clip.num_frames / clip.stored_s[-1]).limit_denominator(1001)
    rate = mean_rate if clip.is_variable else 1 / clip.gaps_s[0]
    stream = container.add_stream(clip.encoding.codec, rate=rate, options=dict(clip.encoding.options))
    height, width = (WIDTH, HEIGHT) if clip.rotation_deg % 180 else (HEIGHT, WIDTH)
    stream.width, stream.height, stream.pix_fmt = width, height, clip.encoding.pixel_format
    stream.thread_count = 1
    stream.codec_context.time_base = TICK if clip.is_variable else clip.gaps_s[0]
    if clip.rotation_deg:
        stream.set_display_rotation(clip.rotation_deg)
    return stream


def _planes(picture: UInt8Array, rotation_deg: int) -> UInt8Array:
    """Lays out a grey picture as yuv420p, turned so that a player turns it back."""
    grey = np.rot90(picture, -rotation_deg // 90)
    return np.concatenate([grey, np.full((grey.shape[0] // 2, grey.shape[1]), 128, np.uint8)])


def _as(frame: av.VideoFrame, pixel_format: str) -> av.VideoFrame:
    if pixel_format == "yuv420p":
        return frame
    changed = frame.reformat(format=pixel_format)
    changed.time_base, changed.pts = frame.time_base, frame.pts
    return changed


class _Pipe(io.RawIOBase):
    """A file that cannot seek, as what a camera or a browser records is."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Sound:
    """Writes silence beside the frames."""

    def __init__(self, container: Any, clip: Clip) -> None:
        assert clip.sound
        codec, self._rate = _SOUND.get(clip.container, _AAC)
        self._container = container
        self._stream = container.add_stream(codec, rate=self._rate, layout="mono")
        self._pts, self._end = (round(time_s * self._rate) for time_s in clip.sound)

    def until(self, time_s: float) -> None:
        """Writes what is heard before a time, seconds."""
        while self._pts < min(self._end, time_s * self._rate):
            fmt = self._stream.format.name
            frame = av.AudioFrame(format=fmt, layout="mono", samples=_SAMPLES)
            for plane in frame.planes:
                plane.update(bytes(plane.buffer_size))
            frame.sample_rate, frame.pts, frame.time_base = self._rate, self._pts, Fraction(1, self._rate)
            self._container.mux(self._stream.encode(frame))
            self._pts += _SAMPLES

    def close(self) -> None:
        self.until(self._end / self._rate)
        self._container.mux(self._stream.encode())
