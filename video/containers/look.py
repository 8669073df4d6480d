"""Reads what planning needs to know of a medium, opening it once and decoding one frame at most."""

from __future__ import annotations

from dataclasses import dataclass, replace

from epd.errors import MediaError, MediaLimitError, UnsupportedMediaError
from epd.types import MediaKind
from epd.video.containers.animation import check_animation, clock, find_animation
from epd.video.containers.audio import audio_length
from epd.video.containers.images import image_size, upright_size
from epd.video.containers.limits import DEFAULT_LIMITS, Limits
from epd.video.containers.mp4_claims import check_claims
from epd.video.containers.mp4_edits import open_as_shown
from epd.video.containers.probe import probe_open
from epd.video.sources.frame_list import LIST_FPS, FrameList, is_frame_list
from epd.video.sources.source import Media, Source, as_media


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """An image, video or clip of sound before it is decoded.

    height, width: pixels; of a video upright, of an image as stored; 0 of sound.
    num_frames, fps: best known; 0 for an image. Of sound its samples and their rate as stored.
    is_frame_list: whether the frames were sampled by the client, so that the request says when they were.
    num_pictures: frames of an animated picture, which is a video and can be taken as an image, too; else 0.
    """

    kind: MediaKind
    height: int
    width: int
    num_frames: int = 0
    fps: float = 0.0
    is_frame_list: bool = False
    num_pictures: int = 0

    def taken_as(self, kind: MediaKind | None) -> MediaFacts:
        """Returns the facts of an animated picture as an image, of which only the first frame is seen.

        kind: as what it is taken; any other medium, and any other kind, changes nothing.
        """
        is_still = kind == "image" and self.num_pictures > 0
        return replace(self, kind="image", num_frames=0, fps=0.0) if is_still else self

    @property
    def num_unseen(self) -> int:
        """Returns how many frames are not seen of an animated picture that is taken as an image."""
        return self.num_pictures - 1 if self.kind == "image" and self.num_pictures else 0


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
