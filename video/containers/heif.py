"""Decodes HEIC and other HEIF stills whole: tiles joined, alpha, then cropped, turned and mirrored.

    grid  --tiles-->  decoder (HEVC, AV1, H.264)  -->  joined  -->  on the background  -->  clap, irot, imir

EXIF's orientation counts for nothing in HEIF: irot and imir say the same.
"""

from __future__ import annotations

import struct
from itertools import product

import av
import av.error
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from PIL import Image

from epd.colour import WHITE, Colour
from epd.errors import CorruptMediaError, MediaLimitError, UnsupportedMediaError
from epd.types import UInt8Array
from epd.video.containers.heif_boxes import Bytes, is_heif, read_items
from epd.video.sources.source import Media

__all__ = ["HeifImage", "is_heif"]

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
