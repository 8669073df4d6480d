"""Reads what planning needs to know of a medium, opening it once and decoding one frame at most.

A `MediaReader` does so in this process, or in children of it that files cannot hurt.
"""

from __future__ import annotations

from typing import Protocol

from epd.errors import MediaError, MediaLimitError, UnsupportedMediaError
from epd.types import Float32Array, MediaFacts, UInt8Array
from epd.video.containers.animation import check_animation, clock, find_animation
from epd.video.containers.audio import AudioSlice, audio_length, load_audio
from epd.video.containers.images import image_size, load_image, upright_size
from epd.video.containers.limits import DEFAULT_LIMITS, Limits
from epd.video.containers.mp4_claims import check_claims
from epd.video.containers.mp4_edits import open_as_shown
from epd.video.containers.probe import probe_open
from epd.video.sources.frame_list import LIST_FPS, FrameList, is_frame_list
from epd.video.sources.local_files import OpenFile
from epd.video.sources.source import Media, Source, as_media


def look(source: Source | Media, *, limits: Limits = DEFAULT_LIMITS, as_audio: bool = False) -> MediaFacts:
    """Returns the kind, size and length of a medium, by its content.

    as_audio: of its sound alone, which may be that of a video.

    Raises MediaNotFoundError, UnsupportedMediaError (also for a video without length or frame rate),
    CorruptMediaError or MediaLimitError.
    """
    media = as_media(source)
    if as_audio:
        return _look_at_audio(media, limits)
    if is_frame_list(media):
        return _look_at_list(media, limits)
    size = image_size(media)
    if size is not None:
        return _look_at_picture(media, size, limits)
    check_claims(media)
    try:
        opened = open_as_shown(media, limits.open_timeout_s)
    except MediaError as error:
        return _look_at_sound_alone(media, limits, error)
    with opened as video:
        info = probe_open(video, limits, has_keyframes=False)
    if info.num_frames < 1 or info.fps <= 0:
        raise UnsupportedMediaError(
            f"{media.name} gives neither its length nor its frame rate "
            f"({info.num_frames} frames at {info.fps} per second); write it into a new container first"
        )
    return MediaFacts("video", info.height, info.width, info.num_frames, info.fps)


def _look_at_picture(media: Media, size: tuple[int, int], limits: Limits) -> MediaFacts:
    """Looks at an image, (height, width) as stored, or at a video that is an animated picture."""
    animation = find_animation(media)
    if animation is None or len(animation.pieces) < 2:
        return MediaFacts("image", *size)
    check_animation(media.name, animation, limits)
    num_ticks, fps = clock(animation)
    return MediaFacts("video", *upright_size(media), num_ticks, fps, num_pictures=len(animation.pieces))


def _look_at_sound_alone(media: Media, limits: Limits, error: MediaError) -> MediaFacts:
    """Looks at what is no video, as `error` says, which is raised for what is no sound either."""
    try:
        return _look_at_audio(media, limits)
    except UnsupportedMediaError:
        raise error from None


def _look_at_audio(media: Media, limits: Limits) -> MediaFacts:
    num_samples, rate = audio_length(media, limits=limits)
    return MediaFacts("audio", 0, 0, num_samples, rate)


def _look_at_list(media: Media, limits: Limits) -> MediaFacts:
    """Reads the header of every frame: all must have one size. Decodes none."""
    frames = FrameList(media)
    height, width = upright_size(frames.frame(0))
    if height * width > limits.max_pixels:
        raise MediaLimitError(
            f"{media.name} has frames of {width} x {height} pixels; allowed {limits.max_pixels}; scale them"
        )
    for index in range(1, len(frames)):
        other = upright_size(frames.frame(index))
        if other != (height, width):
            raise UnsupportedMediaError(
                f"{media.name}: frame {index} has {other[1]} x {other[0]} pixels, frame 0 has "
                f"{width} x {height}; allowed: one size; scale them"
            )
    return MediaFacts("video", height, width, len(frames), LIST_FPS, is_frame_list=True)


class MediaReader(Protocol):
    """Reads open files. name: what messages call the file. For any thread; callers wait."""

    def look(self, file: OpenFile, name: str, *, as_audio: bool = False) -> MediaFacts:
        """Does what `video.look` does. Raises MediaError, UnavailableError."""
        ...

    def load_image(self, file: OpenFile, name: str) -> UInt8Array:
        """Does what `video.load_image` does. Raises as `look`."""
        ...

    def load_audio(self, file: OpenFile, name: str, part: AudioSlice) -> Float32Array:
        """Does what `video.load_audio` does. Raises as `look`, and RequestError."""
        ...


class OwnReader:
    """A MediaReader in this process, for media that are trusted."""

    def look(self, file: OpenFile, name: str, *, as_audio: bool = False) -> MediaFacts:
        return look(Media(file.source, name), as_audio=as_audio)

    def load_image(self, file: OpenFile, name: str) -> UInt8Array:
        return load_image(Media(file.source, name))

    def load_audio(self, file: OpenFile, name: str, part: AudioSlice) -> Float32Array:
        return load_audio(Media(file.source, name), part)
