"""Draws the frames of animated pictures as their formats mean them: blending, disposal and transparency.

    canvas, RGBA  --blend frame 0-->  shown  --dispose-->  canvas  --blend frame 1-->  shown  ...

Every frame needs those before it, so frames are drawn in order; going back starts again. An animation is
shown once, however often its file repeats it.

Of AVIF, the packets of its track say when each frame is shown, and its pixels are drawn by Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import closing

import av.error
import numpy as np
from PIL import Image, UnidentifiedImageError

from epd.colour import WHITE, Colour
from epd.errors import CorruptMediaError, MediaLimitError
from epd.types import UInt8Array
from epd.video.containers.animated_files import (
    MAX_ANIMATION_FRAMES,
    Animation,
    StoredFrame,
    check_number,
    find_pieces,
    shown_for_s,
)
from epd.video.containers.colours import rgb_pixels, rgba_image
from epd.video.containers.limits import Limits
from epd.video.sources.source import Media, Reader, open_container

_OPEN_S = 10.0
# Of all frames together: some minutes of drawing at most.
MAX_ANIMATION_PIXELS = 8_000_000_000
MAX_PIECE_PIXELS = 80_000_000
_CLEAR = (0, 0, 0, 0)
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, IndexError, UnidentifiedImageError)


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
    pieces = [StoredFrame((), 0, 0, *size, shown_for_s(delay_s), is_blended=False) for delay_s in delays_s]
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


def find_animation(media: Media) -> Animation | None:
    """Returns the frames of an animated picture, of which there may be one; None for what is none.

    Any GIF is one. Raises MediaLimitError for more frames than are allowed.
    """
    return find_pieces(media) or find_avif(media)


def check_animation(name: str, animation: Animation, limits: Limits) -> None:
    """Raises MediaLimitError for a canvas, a length or a work of drawing beyond the limits."""
    pixels, num_frames = animation.height * animation.width, len(animation.pieces)
    claims = (
        ("pixels a frame", pixels, limits.max_pixels),
        ("pixels in all frames", pixels * num_frames, MAX_ANIMATION_PIXELS),
        ("seconds", animation.starts_s[-1], limits.max_duration_s),
    )
    for what, received, allowed in claims:
        if received > allowed:
            raise MediaLimitError(f"{name} has {received:g} {what}; allowed {allowed:g}; cut or scale it")


def clock(animation: Animation) -> tuple[int, float]:
    """Returns (ticks, ticks a second) of the clock that planning samples: one tick for the shortest frame.

    Where all frames are on screen equally long, ticks are frames. Else each frame has one tick at least.
    """
    shortest_s = min(piece.delay_s for piece in animation.pieces)
    return max(1, round(animation.starts_s[-1] / shortest_s)), 1 / shortest_s


class Drawing:
    """Draws one animation, frame after frame. For one thread at a time."""

    def __init__(self, media: Media, animation: Animation, background: Colour = WHITE) -> None:
        """Draws nothing yet. The canvas must be within limits."""
        self._media, self._animation, self._background = media, animation, background
        self._sequence = AvifSequence(media) if animation.is_sequence else None
        self._restart()

    def _restart(self) -> None:
        self._num_drawn = 0
        self._canvas = Image.new("RGBA", (self._animation.width, self._animation.height), _CLEAR)
        self._before: Image.Image | None = None  # what the last frame's rectangle was

    def draw_next(self, place: int) -> bool:
        """Draws one frame on the way to `place`. Returns whether that one is shown now. Raises MediaError."""
        if self._num_drawn > place + 1:
            self._restart()
        if self._num_drawn <= place:
            self._dispose()
            self._draw(self._animation.pieces[self._num_drawn])
            self._num_drawn += 1
        return self._num_drawn == place + 1

    def pixels(self) -> UInt8Array:
        """Returns what is shown, on the background, uint8 [H, W, 3]."""
        return rgb_pixels(self._canvas, self._background)

    def _dispose(self) -> None:
        """Does to the rectangle of the last frame what that frame says."""
        if not self._num_drawn:
            return
        last = self._animation.pieces[self._num_drawn - 1]
        if last.disposal == "clear":
            self._canvas.paste(_CLEAR, self._box(last))
        elif self._before is not None:
            self._canvas.paste(self._before, self._box(last))

    def _draw(self, piece: StoredFrame) -> None:
        picture = self._picture(piece)
        box = self._box(piece)
        self._before = self._canvas.crop(box) if piece.disposal == "restore" else None
        part = picture.crop((0, 0, box[2] - box[0], box[3] - box[1]))
        if not part.width or not part.height:
            return
        if piece.is_blended:
            self._canvas.alpha_composite(part, box[:2])
        else:
            self._canvas.paste(part, box)

    def _box(self, piece: StoredFrame) -> tuple[int, int, int, int]:
        """Returns (left, top, right, bottom) of a frame within the canvas."""
        width, height = self._animation.width, self._animation.height
        left, top = min(piece.x, width), min(piece.y, height)
        return left, top, min(width, piece.x + piece.width), min(height, piece.y + piece.height)

    def _picture(self, piece: StoredFrame) -> Image.Image:
        """Decodes a frame, as RGBA. Raises CorruptMediaError, MediaLimitError."""
        name = f"{self._media.name}, frame {self._num_drawn}"
        if piece.width * piece.height > MAX_PIECE_PIXELS:
            raise MediaLimitError(
                f"{name} has {piece.width} x {piece.height} pixels; allowed {MAX_PIECE_PIXELS}; scale it"
            )
        try:
            if self._sequence is not None:
                return self._sequence.picture(self._num_drawn)
            alone = io.BytesIO(self._animation.alone(piece, self._media))
            with Image.open(alone, formats=("GIF", "PNG", "WEBP")) as image:
                if image.size != (piece.width, piece.height):
                    raise ValueError(f"its pixels are {image.width} x {image.height}")
                return rgba_image(image)
        except UNREADABLE as error:
            raise CorruptMediaError(
                f"{name} cannot be decoded ({error}); allowed: complete pictures; copy it again"
            ) from error


def frame_at(starts_s: Sequence[float], time_s: float) -> int:
    """Returns the number of the frame on screen at a time; the last one stays."""
    place = int(np.searchsorted(starts_s, time_s + 1e-6, side="right")) - 1
    return min(max(0, place), len(starts_s) - 2)
