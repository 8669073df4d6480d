"""Decodes images, and tells images, videos and sound by content, never by the name of the file.

A stream of JPEGs is a video; a JPEG that has others behind it is an image:

    stream    FFD8 ... FFD9 | FFD8 ... FFD9 | FFD8 ... FFD9     pictures of one size, and nothing between
    image     FFD8 ... MPF ... FFD9 | FFD8 ... FFD9    a preview or a map of light, which MPF lists

HEIC and other HEIF stills are decoded whole. EXIF's orientation counts for nothing in them: irot and imir say
the same.

    grid  --tiles-->  decoder (HEVC, AV1, H.264)  -->  joined  -->  on the background  -->  clap, irot, imir
"""

from __future__ import annotations

import struct
from contextlib import closing
from itertools import product

import av
import av.error
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
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
from epd.video.containers.heif_boxes import Bytes, is_heif, read_items
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
# Types of items: FFmpeg's decoder, and the property that configures it.
_CODECS = {
    "hvc1": ("hevc", b"hvcC"),
    "hev1": ("hevc", b"hvcC"),
    "av01": ("libdav1d", b"av1C"),
    "avc1": ("h264", b"avcC"),
}
_ALPHA_URNS = (b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha", b"urn:mpeg:hevc:2015:auxid:1")
_MAX_DEPTH = 4  # of images that are made of others
_BLOCK = 64  # a coded picture is larger by less than this on each side
# Tiles may reach beyond the picture that they make.
_MAX_OVERHANG = 4


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
            # Pillow has the size of a TIFF upright from the start.
            is_turned = image.format != "TIFF" and image.getexif().get(_ORIENTATION) in TURNED
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


class HeifImage:
    """The picture that a file is about. For one thread at a time."""

    def __init__(self, media: Media, max_pixels: int) -> None:
        """Reads the header. Raises CorruptMediaError, MediaLimitError, UnsupportedMediaError."""
        self._media, self._max_pixels = media, max_pixels
        self._items = read_items(media)
        self.size = self._size_of(self._items.primary)

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) of what `pixels` returns."""
        shape = np.broadcast_to(np.uint8(0), (*self.size, 3))  # without memory of its own
        height, width, _ = self._transformed(shape, self._items.primary).shape
        return height, width

    def pixels(self, background: Colour = WHITE) -> UInt8Array:
        """Returns uint8 [H, W, 3], upright. Raises as the constructor."""
        self._check_pixels(self.size)
        primary = self._items.primary
        pixels = self._decoded(primary)
        alpha = self._alpha(primary)
        if alpha is not None:
            is_premultiplied = alpha in self._items.made_of.get((b"prem", primary), ())
            pixels = _on(background, pixels, self._decoded(alpha)[:, :, 0], is_premultiplied)
        return np.ascontiguousarray(self._transformed(pixels, primary))

    def _size_of(self, item: int) -> tuple[int, int]:
        """Returns (height, width) before an item is cropped and turned."""
        extents = self._items.first(item, b"ispe")
        if extents is None or len(extents) < 12 or 0 in (size := struct.unpack(">II", extents[4:12])):
            raise self._damaged("has an image without a size")
        return size[1], size[0]

    def _check_pixels(self, size: tuple[int, int]) -> None:
        if size[0] * size[1] > self._max_pixels:
            raise MediaLimitError(
                f"{self._media.name} has {size[1]} x {size[0]} pixels; allowed {self._max_pixels}; "
                "scale it down"
            )

    def _damaged(self, what: str) -> CorruptMediaError:
        return CorruptMediaError(f"{self._media.name} {what}; allowed: complete images; copy it again")

    # Pixels of an item, uint8 [H, W, 3], before it is cropped and turned

    def _decoded(self, item: int, depth: int = 0) -> UInt8Array:
        kind = self._items.kinds.get(item)
        if kind is None:
            raise self._damaged("names an image that is not there")
        if kind in _CODECS:
            return self._coded(item, *_CODECS[kind])
        if kind == "grid" and depth < _MAX_DEPTH:
            return self._joined(item, depth)
        if kind == "iden" and depth < _MAX_DEPTH and (sources := self._items.sources(item)):
            return self._whole(sources[0], depth + 1)
        raise UnsupportedMediaError(
            f"{self._media.name} holds an image of the type '{kind}'; allowed in HEIF: "
            f"{', '.join(_CODECS)} and grids of them; convert it to JPEG or PNG"
        )

    def _whole(self, item: int, depth: int) -> UInt8Array:
        return self._transformed(self._decoded(item, depth), item)

    def _joined(self, item: int, depth: int) -> UInt8Array:
        """Returns the tiles of a grid side by side, row by row, without what reaches beyond the picture."""
        rows, columns, height, width = self._grid(item)
        tiles = self._items.sources(item)
        if len(tiles) != rows * columns:
            raise self._damaged(f"has {len(tiles)} tiles for {rows} x {columns} places")
        tile_height, tile_width = self._size_of(tiles[0])
        self._check_pixels((height, width))
        self._check_pixels((rows * tile_height // _MAX_OVERHANG, columns * tile_width))
        if rows * tile_height < height or columns * tile_width < width:
            raise self._damaged(f"has tiles that do not fill its {width} x {height} pixels")
        joined = np.empty((height, width, 3), np.uint8)
        for tile, (row, column) in zip(tiles, product(range(rows), range(columns)), strict=True):
            top, left = row * tile_height, column * tile_width
            place = joined[top : top + tile_height, left : left + tile_width]
            if not place.size:
                continue
            pixels = self._whole(tile, depth + 1)
            if pixels.shape[:2] != (tile_height, tile_width):
                raise self._damaged("has tiles of several sizes")
            place[...] = pixels[: place.shape[0], : place.shape[1]]
        return joined

    def _grid(self, item: int) -> tuple[int, int, int, int]:
        """Returns (rows, columns, height, width) of a grid."""
        box = Bytes(self._items.data(self._media, item))
        try:
            size = 4 if box.number(2) & 1 else 2
            rows, columns = box.number(1) + 1, box.number(1) + 1
            width, height = box.number(size), box.number(size)
        except struct.error as error:
            raise self._damaged(f"has a damaged grid ({error})") from error
        if not width * height:
            raise self._damaged("has a grid without a size")
        return rows, columns, height, width

    def _coded(self, item: int, codec: str, configuration: bytes) -> UInt8Array:
        """Decodes one coded image by one thread, within the size that the file gives."""
        height, width = self._size_of(item)
        self._check_pixels((height, width))
        context = VideoCodecContext.create(codec, "r")
        assert isinstance(context, VideoCodecContext)
        context.extradata = self._items.first(item, configuration)
        context.thread_count = 1
        context.options = {"max_pixels": str((height + _BLOCK) * (width + _BLOCK))}
        data = self._items.data(self._media, item)
        try:
            frames = [*context.decode(av.Packet(data)), *context.decode(None)]
        except (av.error.FFmpegError, MemoryError, ValueError) as error:
            raise self._damaged(f"cannot be decoded ({type(error).__name__})") from error
        if not frames or (frames[0].height, frames[0].width) != (height, width):
            raise self._damaged(f"has no image of {width} x {height} pixels")
        return self._rgb(frames[0], item)

    def _rgb(self, frame: VideoFrame, item: int) -> UInt8Array:
        """Converts a frame as the file says, else as the codec's own header does, else as BT.601."""
        said = self._items.first(item, b"colr") or b""
        if said[:4] == b"nclx" and len(said) >= 11:
            frame.colorspace = int.from_bytes(said[8:10], "big")
            frame.color_range = 2 if said[10] & 0x80 else 1
        return np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8)

    # Alpha

    def _alpha(self, item: int) -> int | None:
        """Returns the item that is the alpha of another; None without one."""
        return next(
            (
                source
                for (kind, source), targets in self._items.made_of.items()
                if kind == b"auxl"
                and item in targets
                and (self._items.first(source, b"auxC") or b"")[4:].split(b"\0")[0] in _ALPHA_URNS
            ),
            None,
        )

    # What is done to an image after it is decoded

    def _transformed(self, pixels: UInt8Array, item: int) -> UInt8Array:
        """Crops, turns and mirrors pixels, [H, W, 3], in the order that the file gives."""
        for kind, content in self._items.properties.get(item, ()):
            if kind == b"clap":
                pixels = self._cropped(pixels, content)
            elif kind == b"irot" and content:
                pixels = np.rot90(pixels, content[0] & 3)
            elif kind == b"imir" and content:
                pixels = pixels[:, ::-1] if content[0] & 1 else pixels[::-1]
        return pixels

    def _cropped(self, pixels: UInt8Array, content: bytes) -> UInt8Array:
        """Cuts out the clean aperture: its size, and how far its middle is from that of the image."""
        if len(content) < 32 or not all((numbers := struct.unpack(">IIIIiIiI", content[:32]))[1::2]):
            raise self._damaged("has a damaged crop")
        width, height, right, down = (numbers[at] / numbers[at + 1] for at in (0, 2, 4, 6))
        top = round((pixels.shape[0] - height) / 2 + down)
        left = round((pixels.shape[1] - width) / 2 + right)
        if min(top, left) < 0 or min(height, width) < 1:
            raise self._damaged("is cropped to what is not there")
        part = pixels[top : top + round(height), left : left + round(width)]
        if part.shape[:2] != (round(height), round(width)):
            raise self._damaged("is cropped to what is not there")
        return part


def _on(background: Colour, pixels: UInt8Array, alpha: UInt8Array, is_premultiplied: bool) -> UInt8Array:
    """Returns pixels, [H, W, 3], on a background by their alpha, [H, W], which may have another size."""
    if alpha.shape != pixels.shape[:2]:
        alpha = np.asarray(Image.fromarray(alpha).resize(pixels.shape[1::-1], Image.Resampling.BILINEAR))
    result = np.empty_like(pixels)
    for row in range(len(pixels)):  # by rows, without floats of the whole image
        share = alpha[row, :, None].astype(np.float32) / 255
        colours = pixels[row].astype(np.float32) * (1 if is_premultiplied else share)
        result[row] = np.clip(np.rint(colours + (1 - share) * np.array(background, np.float32)), 0, 255)
    return result
