"""Decodes images, and tells images, videos and sound by content, never by the name of the file.

A stream of JPEGs is a video; a JPEG that has others behind it is an image:

    stream    FFD8 ... FFD9 | FFD8 ... FFD9 | FFD8 ... FFD9     pictures of one size, and nothing between
    image     FFD8 ... MPF ... FFD9 | FFD8 ... FFD9    a preview or a map of light, which MPF lists
"""

from __future__ import annotations

from contextlib import closing

from PIL import (
    AvifImagePlugin,
    Image,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from epd.colour import WHITE, Colour
from epd.errors import CorruptMediaError, MediaError, MediaLimitError, UnsupportedMediaError
from epd.types import MediaKind, UInt8Array
from epd.video.containers.animation import UNREADABLE, Drawing, find_animation
from epd.video.containers.audio import has_audio
from epd.video.containers.colours import rgb_pixels
from epd.video.containers.heif import HeifImage, is_heif
from epd.video.containers.orientation import TURNED, upright_by_exif
from epd.video.sources.source import Media, Reader, Source, as_media, open_video

_MAX_PICTURE_BYTES = 16 << 20  # of the first two pictures
_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset(range(0xD0, 0xD9)) | {0x00, 0x01, 0xFF}
IMAGE_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "PPM")
# With all of these imported, Pillow does not look for more of its 43 plugins where a file is no image.
_PLUGINS = (AvifImagePlugin, TiffImagePlugin, WebPImagePlugin)  # it imports the others by itself
MAX_IMAGE_PIXELS = 80_000_000
_ORIENTATION = 0x0112  # the tag of EXIF


def is_motion_jpeg(media: Media) -> bool:
    """Returns whether two JPEGs of one size follow each other, of which the first lists no others."""
    if media.head(len(_START)) != _START:
        return False
    data = media.head(_MAX_PICTURE_BYTES)
    first = _picture(data, 0)
    if first is None or data[first[0] : first[0] + 2] != _START:
        return False
    second = _picture(data, first[0])
    return second is not None and second[1] == first[1] and b"MPF\0" not in data[: first[0]]


def _picture(data: bytes, start: int) -> tuple[int, bytes] | None:
    """Returns where a picture ends, and (height, width) as its header has them; None for a torn one."""
    at, size = start + 2, b""
    while 0 <= at < len(data) - 4:
        marker = data[at + 1]
        if data[at] != 0xFF or marker in _WITHOUT_LENGTH:
            at = data.find(b"\xff", at + 1)
            continue
        if data[at : at + 2] == _END:
            return at + 2, size
        if marker in _FRAME_HEADERS:
            size = data[at + 5 : at + 9]
        at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return (len(data), size) if data.endswith(_END) and size else None


def load_image(
    source: Source | Media, *, max_pixels: int = MAX_IMAGE_PIXELS, background: Colour = WHITE
) -> UInt8Array:
    """Returns the image as uint8 [H, W, 3] RGB, turned upright; of an animated picture its first frame.

    background: what shows through transparency.

    Raises MediaNotFoundError, UnsupportedMediaError, CorruptMediaError or MediaLimitError.
    """
    media = as_media(source)
    if is_heif(media):
        return HeifImage(media, max_pixels).pixels(background)
    with closing(media.reader()) as file, _identify(media, file) as image:
        _check_pixels(media, image.width, image.height, max_pixels)
        try:
            first = _first_of_gif(media, background) if image.format == "GIF" else None
            pixels = rgb_pixels(image, background) if first is None else first
            return upright_by_exif(pixels, image.getexif().get(_ORIENTATION, 1))
        except UNREADABLE as error:
            raise CorruptMediaError(
                f"{media.name} cannot be decoded ({error}); allowed: complete images; copy it again"
            ) from error


def _check_pixels(media: Media, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise MediaLimitError(
            f"{media.name} has {width} x {height} pixels; allowed {max_pixels}; scale it down"
        )


def _first_of_gif(media: Media, background: Colour) -> UInt8Array | None:
    """Returns the first frame where it belongs on its canvas, around which is nothing; None without one."""
    animation = find_animation(media)
    if animation is None:
        return None
    drawing = Drawing(media, animation, background)
    drawing.draw_next(0)
    return drawing.pixels()


def media_kind(source: Source | Media) -> MediaKind:
    """Returns what a source is, by its content: audio is what has sound and no pictures that move.

    An animated picture is a video.

    Raises MediaNotFoundError, UnsupportedMediaError or CorruptMediaError where it is nothing of these.
    """
    media = as_media(source)
    if image_size(media) is not None:
        return "video" if num_pictures(media) > 1 else "image"
    try:
        open_video(media).close()
    except MediaError:
        if has_audio(media):
            return "audio"
        raise
    return "video"


def image_size(source: Source | Media) -> tuple[int, int] | None:
    """Returns (height, width) of an image as stored, from its header; None for what is not an image.

    Raises MediaNotFoundError, CorruptMediaError or MediaLimitError.
    """
    media = as_media(source)
    if is_heif(media):
        return HeifImage(media, MAX_IMAGE_PIXELS).size
    if is_motion_jpeg(media):
        return None
    try:
        with closing(media.reader()) as file, _identify(media, file) as image:
            return image.height, image.width
    except UnsupportedMediaError:
        return None


def upright_size(source: Source | Media) -> tuple[int, int]:
    """Returns (height, width) of an image as `load_image` turns it. Raises as `load_image`."""
    media = as_media(source)
    if is_heif(media):
        return HeifImage(media, MAX_IMAGE_PIXELS).upright_size
    with closing(media.reader()) as file, _identify(media, file) as image:
        try:
            is_turned = image.getexif().get(_ORIENTATION) in TURNED
        except UNREADABLE as error:
            raise CorruptMediaError(
                f"{media.name} cannot be read ({error}); allowed: complete images; copy it again"
            ) from error
        return (image.width, image.height) if is_turned else (image.height, image.width)


def num_pictures(media: Media) -> int:
    """Returns how many frames an animated picture has; of other images 1.

    Raises MediaLimitError.
    """
    animation = find_animation(media)
    return len(animation.pieces) if animation else 1


def exif_orientation(media: Media) -> int:
    """Returns the orientation of an image that Pillow reads, 1 to 8. Raises CorruptMediaError."""
    with closing(media.reader()) as file, _identify(media, file) as image:
        return int(image.getexif().get(_ORIENTATION, 1))


def _identify(media: Media, file: Reader) -> Image.Image:
    """Returns the image in `file` with only its header read; Pillow leaves the file open."""
    try:
        return Image.open(file, formats=IMAGE_FORMATS)  # type: ignore[arg-type]
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaLimitError(
            f"{media.name}: {error}; allowed {MAX_IMAGE_PIXELS} pixels; scale it down"
        ) from error
    except UnidentifiedImageError as error:
        raise UnsupportedMediaError(
            f"{media.name} is not an image that can be read; allowed: {', '.join(IMAGE_FORMATS)}; convert it"
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise CorruptMediaError(
            f"{media.name} has a damaged header ({error}); allowed: complete images; copy it again"
        ) from error
