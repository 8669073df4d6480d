"""Decodes images, and tells images, videos and sound by content, never by the name of the file."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from epd.errors import CorruptMediaError, MediaError, MediaLimitError, UnsupportedMediaError
from epd.types import MediaKind, UInt8Array
from video.containers.audio import has_audio
from video.sources.source import Media, Reader, Source, as_media, open_video

IMAGE_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "AVIF", "PPM")
MAX_IMAGE_PIXELS = 80_000_000
_ORIENTATION = 0x0112  # the tag of EXIF
_TURNED = frozenset({5, 6, 7, 8})  # its values that exchange height and width


def load_image(source: Source | Media, *, max_pixels: int = MAX_IMAGE_PIXELS) -> UInt8Array:
    """Returns the image as uint8 [H, W, 3] RGB, turned upright as its EXIF orientation says.

    Raises MediaNotFoundError, UnsupportedMediaError, CorruptMediaError or MediaLimitError.
    """
    media = as_media(source)
    with closing(media.reader()) as file, _identify(media, file) as image:
        if image.width * image.height > max_pixels:
            raise MediaLimitError(
                f"{media.name} has {image.width} x {image.height} pixels; allowed {max_pixels}; scale it down"
            )
        try:
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))
        except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
            raise CorruptMediaError(
                f"{media.name} cannot be decoded ({error}); allowed: complete images; copy it again"
            ) from error


def media_kind(source: Source | Media) -> MediaKind:
    """Returns what a source is, by its content: audio is what has sound and no pictures that move.

    Raises MediaNotFoundError, UnsupportedMediaError or CorruptMediaError where it is nothing of these.
    """
    media = as_media(source)
    if image_size(media) is not None:
        return "image"
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
    try:
        with closing(media.reader()) as file, _identify(media, file) as image:
            return image.height, image.width
    except UnsupportedMediaError:
        return None


def upright_size(source: Source | Media) -> tuple[int, int]:
    """Returns (height, width) of an image as `load_image` turns it. Raises as `load_image`."""
    media = as_media(source)
    with closing(media.reader()) as file, _identify(media, file) as image:
        try:
            is_turned = image.getexif().get(_ORIENTATION) in _TURNED
        except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
            raise CorruptMediaError(
                f"{media.name} cannot be read ({error}); allowed: complete images; copy it again"
            ) from error
        return (image.width, image.height) if is_turned else (image.height, image.width)


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
