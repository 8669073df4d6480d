"""Reads sequences of AVIF: when each frame is shown by the packets of its track, its pixels by Pillow."""

from __future__ import annotations

from contextlib import closing

import av.error
from PIL import Image

from epd.video.containers.animated_files import (
    MAX_ANIMATION_FRAMES,
    Animation,
    Piece,
    check_number,
    shown_for_s,
)
from epd.video.containers.colours import rgba_image
from epd.video.sources.source import Media, Reader, open_container

_OPEN_S = 10.0


def find_avif(media: Media) -> Animation | None:
    """Returns the frames of a sequence; None for another file, or one whose times cannot be read.

    Raises MediaLimitError, and CorruptMediaError where FFmpeg cannot open it.
    """
    if media.head(12)[4:] != b"ftypavis":
        return None
    try:
        with closing(media.reader()) as file, Image.open(file, formats=["AVIF"]) as image:  # type: ignore[arg-type]
            num_frames, size = int(getattr(image, "n_frames", 1)), image.size
    except (OSError, SyntaxError, ValueError):  # who reads it as an image says what is wrong
        return None
    check_number(media, num_frames)
    delays_s = _delays_s(media, num_frames)
    pieces = [Piece((), 0, 0, *size, shown_for_s(delay_s), is_blended=False) for delay_s in delays_s]
    return Animation(size[1], size[0], tuple(pieces)) if pieces else None


def _delays_s(media: Media, num_frames: int) -> list[float]:
    """Returns how long each packet of the track with so many frames is shown; empty without such a track."""
    with open_container(media, _OPEN_S, "mov") as container:
        tracks = [stream for stream in container.streams.video if stream.frames == num_frames > 1]
        if not tracks or tracks[0].time_base is None:
            return []
        time_base = float(tracks[0].time_base)
        try:
            packets = [packet for packet in container.demux(tracks[0]) if packet.size]
        except av.error.FFmpegError:
            return []
        return [(packet.duration or 0) * time_base for packet in packets][:MAX_ANIMATION_FRAMES]


class AvifSequence:
    """Decodes the frames of a sequence, in order. For one thread at a time."""

    def __init__(self, media: Media) -> None:
        self._file: Reader = media.reader()
        self._image = Image.open(self._file, formats=["AVIF"])  # type: ignore[arg-type]

    def picture(self, place: int) -> Image.Image:
        """Returns a frame as RGBA. Raises what Pillow does."""
        self._image.seek(place)
        return rgba_image(self._image)
