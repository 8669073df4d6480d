"""Turns pixels of any mode into RGB: transparency onto a background, deep samples rescaled to 8 bits.

ICC profiles and gamma are left as they are, as the models' own processors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT

from epd.colour import WHITE, Colour
from epd.types import UInt8Array

# Rows are converted in bands of about so many pixels, so that no second whole image is needed.
_BAND_PIXELS = 4 << 20
_DEEP_MODES = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I", "F"})
_DEEP_COLOUR = "RGB;16B"  # how Pillow reads PNG of 16 bits a colour: the upper byte of each
_LOWER_BYTES = "RGB;16L"
_UNSIGNED = 1  # SampleFormat of TIFF
_Levels: TypeAlias = "npt.NDArray[np.float64]"
# Gives the alpha of a band, uint8 [H, W], by the number of its first row.
_Alpha: TypeAlias = Callable[[Image.Image, int], UInt8Array]


def rgb_pixels(image: Image.Image, background: Colour = WHITE) -> UInt8Array:
    """Decodes an image and returns it as uint8 [H, W, 3] RGB, as it is stored: not turned upright.

    background: what shows through transparency, and all that shows where alpha is 0.

    Raises what Pillow does for damaged images.
    """
    key = _colour_key(image)  # from the header, which decoding drops
    image.load()
    to_rgba = _conversion(image, key)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top, band in _bands(image):
        pixels[top : top + band.height] = _flat(to_rgba(band, top), background)
    return pixels


def rgba_image(image: Image.Image) -> Image.Image:
    """Decodes an image and returns it with 8 bits a sample and alpha. Raises as `rgb_pixels`."""
    key = _colour_key(image)
    image.load()
    return _conversion(image, key)(image, 0).convert("RGBA")


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yields (first row, rows), all of an image's."""
    step = max(1, _BAND_PIXELS // max(1, image.width))
    for top in range(0, image.height, step):
        yield top, image.crop((0, top, image.width, min(image.height, top + step)))


def _flat(image: Image.Image, background: Colour) -> UInt8Array:
    """Returns uint8 [H, W, 3] of an image with 8 bits a sample."""
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    ground = Image.new("RGBA", image.size, (*background, 255))
    ground.alpha_composite(image.convert("RGBA"))
    return np.asarray(ground.convert("RGB"))


def _conversion(image: Image.Image, key: _Alpha | None) -> Callable[[Image.Image, int], Image.Image]:
    """Returns what makes 8 bits a sample of a band, given its first row, with alpha where it has some."""
    levels = _levels(image) if image.mode in _DEEP_MODES else None
    if key is not None:
        image.info.pop("transparency", None)

    def convert(band: Image.Image, top: int) -> Image.Image:
        alpha = None if key is None else key(band, top)
        if levels is not None:
            band.info.pop("transparency", None)
            band = Image.fromarray(np.rint(255 * levels(band)).astype(np.uint8))
        if alpha is not None:
            band = band.convert("RGB")
            band.putalpha(Image.fromarray(alpha))
        return band

    return convert


# Deep samples


def _levels(image: Image.Image) -> Callable[[Image.Image], _Levels]:
    """Returns what gives the samples of a band from 0, black, to 1, white.

    Of 16 bits or fewer the range is the format's. Floats within 0 to 1 are taken as they are; others, and
    integers of 32 bits, from the least of the image to its greatest.
    """
    low, high = _range(image)
    span = high - low or 1.0
    is_inverted = _tag(image, PHOTOMETRIC_INTERPRETATION, 1) == 0

    def levels(band: Image.Image) -> _Levels:
        values = np.clip((np.nan_to_num(_samples(band, image), posinf=high, neginf=low) - low) / span, 0, 1)
        return 1 - values if is_inverted else values

    return levels


def _range(image: Image.Image) -> tuple[float, float]:
    """Returns the samples that are black and white."""
    if image.mode.startswith("I;16"):
        return 0.0, float(2 ** min(16, _tag(image, BITSPERSAMPLE, 16)) - 1)
    if image.mode == "I" and image.format in ("PNG", "PPM"):
        return 0.0, 65535.0
    low, high = np.inf, -np.inf
    for _, band in _bands(image):
        values = _samples(band, image)
        values = values[np.isfinite(values)]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    if image.mode == "F" and (low >= 0 or low == np.inf) and high <= 1:
        return 0.0, 1.0
    return low, high


def _samples(band: Image.Image, image: Image.Image) -> _Levels:
    values = np.asarray(band)
    if image.mode == "I" and _tag(image, SAMPLEFORMAT, 0) == _UNSIGNED:
        values = values.astype(np.int32).view(np.uint32)
    return values.astype(np.float64)


def _tag(image: Image.Image, tag: int, default: int) -> int:
    """Returns the first value of a tag of TIFF; the default for other formats."""
    tags = getattr(image, "tag_v2", None)
    value = default if tags is None else tags.get(tag, default)
    return int(value[0] if isinstance(value, tuple) else value)


# Colours that PNG declares transparent


def _colour_key(image: Image.Image) -> _Alpha | None:
    """Returns what gives the alpha of a band; None without a key, and where Pillow can tell it.

    Pillow compares keys of fewer or more than 8 bits with samples of 8.
    """
    key = image.info.get("transparency")
    if not isinstance(image, PngImageFile) or key is None or not image.tile:
        return None
    raw_mode = str(image.tile[0].args)
    if isinstance(key, int) and raw_mode in ("L;2", "L;4"):
        return _is_not(key * (85 if raw_mode == "L;2" else 17))
    if isinstance(key, int) and image.mode.startswith("I;16"):
        return _is_not(key)
    if isinstance(key, tuple) and raw_mode == _DEEP_COLOUR:
        return _is_not_deep(image, key)
    return None


def _is_not(key: int) -> _Alpha:
    return lambda band, _: np.where(np.asarray(band) == key, 0, 255).astype(np.uint8)


def _is_not_deep(image: PngImageFile, key: tuple[int, ...]) -> _Alpha:
    """Returns what compares all 16 bits of each colour: Pillow keeps the upper ones."""
    file = image.fp

    def alpha(band: Image.Image, top: int) -> UInt8Array:
        if not lower:
            lower.append(_lower_bytes(file))
        low = np.asarray(lower[0].crop((0, top, band.width, top + band.height)))
        deep = np.asarray(band).astype(np.uint16) << 8 | low
        return np.where((deep == np.array(key, np.uint16)).all(-1), 0, 255).astype(np.uint8)

    lower: list[Image.Image] = []
    return alpha


def _lower_bytes(file: Any) -> Image.Image:
    """Decodes the lower byte of each colour of a PNG of 16 bits a colour, which is open already."""
    file.seek(0)
    image = PngImageFile(file)
    image.tile = [tile._replace(args=_LOWER_BYTES) for tile in image.tile]
    image.load()
    return image
