"""Decodes sound to one channel at the rate of a model: files of audio, and the tracks of videos.

    file, decoded from its start   |          |   wanted    |        |
    samples at the model's rate    0        start         stop          what is before is decoded and dropped

The file is resampled from its start, so that a part of it has the same samples as the whole. It begins where
its track does; seconds of a part count from the start of the picture, if there is one. Channels count alike:
FFmpeg would weigh them, and make sound that is in several louder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice

import av.container
import av.error
import av.stream
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

from epd.errors import CorruptMediaError, MediaError, MediaLimitError, RequestError, UnsupportedMediaError
from epd.types import Float32Array
from epd.video.containers.limits import DEFAULT_LIMITS, Limits
from epd.video.containers.mp4_claims import check_claims
from epd.video.sources.source import CONTAINER_FORMATS, Media, Source, as_media, open_container, reason

AUDIO_FORMATS = f"{CONTAINER_FORMATS},wav,w64,aiff,caf,mp3,aac,flac"
# Samples per second of a source. With fewer, one of its frames would become millions of samples.
_MIN_RATE, _MAX_RATE = 2_000, 768_000
# Full scale is 1; what is far louder is no sound, and its powers are not finite.
_MAX_VALUE = 1e4
_ALLOWED = "allowed: sound as WAV, MP3, AAC, M4A, FLAC or Ogg, or of a video"


@dataclass(frozen=True, slots=True)
class AudioSlice:
    """Selects samples of a medium.

    rate: per second, that they are resampled to.
    max_samples: more are refused.
    start_s, end_s: only of this part of the medium, None for its end.
    """

    rate: int
    max_samples: int
    start_s: float = 0.0
    end_s: float | None = None

    @property
    def start(self) -> int:
        return round(self.start_s * self.rate)

    @property
    def stop(self) -> int:
        """Returns the place behind the last sample that is decoded: one more than are allowed, at most."""
        most = self.start + self.max_samples + 1
        return most if self.end_s is None else min(most, round(self.end_s * self.rate))

    def later_by(self, lead_s: float) -> AudioSlice:
        """Returns the same part in seconds of a track whose start is `lead_s` before that of the medium.

        A part from the start on has all of the track's beginning.
        """
        end_s = None if self.end_s is None else max(0.0, self.end_s + lead_s)
        return replace(self, start_s=max(0.0, self.start_s + lead_s) if self.start_s else 0.0, end_s=end_s)


def load_audio(source: Source | Media, part: AudioSlice, *, limits: Limits = DEFAULT_LIMITS) -> Float32Array:
    """Returns samples of the first track of sound, mixed to one channel: float32 [N], full scale 1.

    Raises MediaNotFoundError, UnsupportedMediaError, CorruptMediaError, MediaLimitError for more than
    `part.max_samples`, RequestError for a part behind the end.
    """
    media = as_media(source)
    with _open(media, limits) as container:
        frames = _frames(media, container, _track(media, container))
        first = list(islice(frames, 1))
        own = part.later_by(_lead_s(container, first))
        pieces, num_decoded = [np.empty(0, np.float32)], 0
        for samples in _resampled(media, chain(first, frames), part.rate):
            begin = max(0, own.start - num_decoded)
            pieces.append(samples[begin : max(begin, own.stop - num_decoded)].copy())
            num_decoded += len(samples)
            if num_decoded >= own.stop:
                break
    wanted = np.concatenate(pieces)
    _check(media, part, wanted, num_decoded)
    return wanted


def audio_length(source: Source | Media, *, limits: Limits = DEFAULT_LIMITS) -> tuple[int, float]:
    """Returns the samples of a medium's first track of sound, 0 if it does not say, and their rate in Hz.

    Decodes the first of them. Raises as `load_audio`.
    """
    media = as_media(source)
    with _open(media, limits) as container:
        stream = _track(media, container)
        frame = next(_frames(media, container, stream), None)
        if frame is None:
            raise _silent(media)
        duration_s = (
            float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
        )
        duration_s = duration_s or (container.duration or 0) / 1e6
        if duration_s > limits.max_duration_s:
            raise MediaLimitError(
                f"{media.name} has {duration_s:g} seconds; allowed {limits.max_duration_s:g}; cut it"
            )
        return max(0, round(duration_s * frame.sample_rate)), float(frame.sample_rate)


def has_audio(media: Media, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Reports whether a medium has sound that can be decoded."""
    try:
        audio_length(media, limits=limits)
    except MediaError:
        return False
    return True


def _open(media: Media, limits: Limits) -> av.container.InputContainer:
    check_claims(media)
    try:
        return open_container(media, limits.open_timeout_s, AUDIO_FORMATS)
    except UnsupportedMediaError as error:
        raise UnsupportedMediaError(
            f"{media.name} has no sound that can be read; {_ALLOWED}; convert it"
        ) from error


def _track(media: Media, container: av.container.InputContainer) -> AudioStream:
    """Chooses the first track, decoded by one thread."""
    found = (each for each in container.streams.audio if each.codec_context is not None)
    stream: AudioStream | None = next(found, None)
    if stream is None:
        kinds = sorted({each.type for each in container.streams})
        raise UnsupportedMediaError(
            f"{media.name} has no sound, only streams of kind {kinds}; {_ALLOWED}; give one"
        )
    stream.codec_context.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    return stream


def _frames(
    media: Media, container: av.container.InputContainer, stream: AudioStream
) -> Iterator[AudioFrame]:
    """Decodes a track from its start. Raises CorruptMediaError, MediaLimitError for an impossible rate."""
    try:
        for packet in container.demux(stream):
            for frame in packet.decode():
                assert isinstance(frame, AudioFrame)
                if not _MIN_RATE <= frame.sample_rate <= _MAX_RATE:
                    raise MediaLimitError(
                        f"{media.name} has {frame.sample_rate} samples a second; allowed {_MIN_RATE} to "
                        f"{_MAX_RATE}; resample it"
                    )
                yield frame
    except (av.error.FFmpegError, ValueError) as error:
        raise _damaged(media, error) from error


def _lead_s(container: av.container.InputContainer, first: Sequence[AudioFrame]) -> float:
    """Returns by how much the sound begins before the picture, seconds; 0 without a picture, or times.

    first: the first frame of the sound, if there is one.
    """
    pictures = (each for each in container.streams.video if not _is_cover(each))
    picture = next(pictures, None)
    if picture is None or picture.start_time is None or picture.time_base is None or not first:
        return 0.0
    start_s = float(picture.start_time * picture.time_base)
    return 0.0 if first[0].time is None else start_s - first[0].time


def _is_cover(stream: av.stream.Stream) -> bool:
    return bool(stream.disposition & av.stream.Disposition.attached_pic)


def _resampled(media: Media, frames: Iterable[AudioFrame], rate: int) -> Iterator[Float32Array]:
    """Yields a track's samples, the mean of its channels, float32 [N] at `rate`, in order.

    Where a broadcast goes from two channels to six, or a podcast to its next file, another resampler follows.
    """
    try:
        for _, alike in groupby(frames, _form):
            resampler = AudioResampler(format="fltp", rate=rate)
            for frame in chain(alike, [None]):
                for out in resampler.resample(frame):
                    if out is not None:  # at the end of a track that needed no resampling
                        yield out.to_ndarray().mean(axis=0)
    except (av.error.FFmpegError, ValueError) as error:
        raise _damaged(media, error) from error


def _form(frame: AudioFrame) -> tuple[str, str, int]:
    return frame.format.name, frame.layout.name, frame.sample_rate


def _check(media: Media, part: AudioSlice, wanted: Float32Array, num_decoded: int) -> None:
    if len(wanted) > part.max_samples:
        raise MediaLimitError(
            f"{media.name} has more than {part.max_samples / part.rate:g} s of sound"
            f"{f' from {part.start_s:g} s on' if part.start_s else ''}; allowed up to that at once; "
            "give a shorter part by start_s and end_s"
        )
    if not num_decoded:
        raise _silent(media)
    if not len(wanted):
        raise RequestError(
            f"received a part from {part.start_s:g} s to "
            f"{'the end' if part.end_s is None else f'{part.end_s:g} s'} of {media.name}, which has "
            f"{num_decoded / part.rate:g} s of sound; allowed: a part of that; change start_s or end_s"
        )
    if not np.abs(wanted).max() <= _MAX_VALUE:  # NaN is not either
        raise CorruptMediaError(
            f"{media.name} has samples that are not finite or above {_MAX_VALUE:g} times full scale; "
            "allowed: up to that; encode it again"
        )


def _silent(media: Media) -> CorruptMediaError:
    return CorruptMediaError(
        f"{media.name} has a track of sound without samples; allowed: one or more; encode it again"
    )


def _damaged(media: Media, error: Exception) -> CorruptMediaError:
    return CorruptMediaError(
        f"{media.name} has damaged sound ({reason(error)}); allowed: intact files; copy or encode it again"
    )
