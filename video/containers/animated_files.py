"""Finds the frames of animated GIF, PNG and WebP files without decoding them.

Each frame is a rectangle of the canvas. `Animation.alone` gives it as a file of its own, a still picture that
any decoder reads; `animation.py` puts it where it belongs.

    file   | header | control 0 | pixels 0 | control 1 | pixels 1 | ...
    alone  | header                                    | pixels 1 | end |

What follows damage is not there: a file that was cut off has the frames before the cut.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from epd.errors import MediaLimitError
from epd.video.sources.source import Media, Reader

Disposal = Literal["keep", "clear", "restore"]
MAX_ANIMATION_FRAMES = 1 << 16
# Browsers show frames of 10 ms and less, as files say that were never meant to be so fast, for this long.
_SHORT_S, _SHOWN_FOR_S = 0.0105, 0.1
_PNG = b"\x89PNG\r\n\x1a\n"
_NO_CONTROL = b"!\xf9\x04\0\0\0\0\0"
_GIF_DISPOSALS: dict[int, Disposal] = {2: "clear", 3: "restore"}
_PNG_DISPOSALS: dict[int, Disposal] = {1: "clear", 2: "restore"}
_FILE_HEADER, _CHUNK_HEADER, _FRAME_HEADER = 12, 8, 16  # bytes of WebP
# Largest chunk of a PNG that is kept for every frame: palette and transparency.
_MAX_KEPT_BYTES = 768


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A frame as it is stored.

    spans: (offset, bytes) of its pixels in the file
    x, y, width, height: the rectangle of the canvas that it changes
    delay_s: how long it is on screen
    is_blended: whether what was there shows through its transparency, or is replaced
    disposal: what becomes of the rectangle before the next frame: it stays, becomes transparent, or is again
        what it was before this frame
    control: bytes that its decoding needs: of GIF its control block, of PNG nothing
    """

    spans: tuple[tuple[int, int], ...]
    x: int
    y: int
    width: int
    height: int
    delay_s: float
    is_blended: bool = True
    disposal: Disposal = "keep"
    control: bytes = b""


@dataclass(frozen=True, slots=True)
class Animation:
    """The frames of a file.

    height, width: pixels of the canvas
    _alone: makes a file of a frame's own data; None where only a decoder of the whole file has them
    """

    height: int
    width: int
    pieces: tuple[StoredFrame, ...]
    _alone: Callable[[StoredFrame, bytes], bytes] | None = None

    @property
    def is_sequence(self) -> bool:
        """Returns whether frames are coded by those before them, so that none can be read alone."""
        return self._alone is None

    @property
    def starts_s(self) -> list[float]:
        """When each frame is shown, seconds, and at last when the last one ends."""
        return [0.0, *accumulate(piece.delay_s for piece in self.pieces)]

    def alone(self, piece: StoredFrame, media: Media) -> bytes:
        """Returns a frame as a file of its own, unless `is_sequence`."""
        assert self._alone is not None
        with closing(media.reader()) as file:
            data = b"".join(_read(file, offset, num_bytes) for offset, num_bytes in piece.spans)
        return self._alone(piece, data)


def find_pieces(media: Media) -> Animation | None:
    """Returns the frames of a GIF, PNG or WebP that is animated, of which there may be one; else None.

    Any GIF is one. Raises MediaLimitError for more frames than are allowed.
    """
    head = media.head(_FILE_HEADER)
    for is_such, find in _FORMATS:
        if is_such(head):
            with closing(media.reader()) as file:
                return find(file, media)
    return None


def shown_for_s(delay_s: float) -> float:
    """Returns how long browsers show a frame whose file says `delay_s`."""
    return _SHOWN_FOR_S if delay_s < _SHORT_S else delay_s


def _read(file: Reader, offset: int, num_bytes: int) -> bytes:
    file.seek(offset)
    return file.read(num_bytes)


def _animation(
    size: tuple[int, int], pieces: list[StoredFrame], alone: Callable[[StoredFrame, bytes], bytes]
) -> Animation | None:
    return Animation(*size, tuple(pieces), alone) if pieces else None


def check_number(media: Media, num_pieces: int) -> None:
    """Raises MediaLimitError for more frames than are allowed."""
    if num_pieces > MAX_ANIMATION_FRAMES:
        raise MediaLimitError(
            f"{media.name} has {num_pieces} frames or more; allowed {MAX_ANIMATION_FRAMES}; cut it"
        )


# GIF: blocks, each of which ends with an empty part


def _find_gif(file: Reader, media: Media) -> Animation | None:
    header = _read(file, 0, 13)
    if len(header) < 13:
        return None
    width, height, flags = struct.unpack("<HHB", header[6:11])
    palette = file.read(_palette_bytes(flags))
    pieces = list(_gif_pieces(file, media))
    if pieces:  # a first frame that is larger makes the canvas larger
        first = pieces[0]
        width, height = max(width, first.x + first.width), max(height, first.y + first.height)
    return _animation((height, width), pieces, lambda piece, data: _gif(flags, palette, piece, data))


def _gif_pieces(file: Reader, media: Media) -> Iterator[StoredFrame]:
    """Yields the frames up to the end or to damage."""
    control, num_pieces = _NO_CONTROL, 0
    while (kind := file.read(1)) in (b"!", b","):
        at = file.tell()
        head = file.read(9)
        if len(head) < 9:  # no room for another frame
            return
        file.seek(at + 1 if kind == b"!" else at + 10 + _palette_bytes(head[8]))
        if not _skip_blocks(file, media.size_bytes):
            return
        if kind == b",":
            num_pieces += 1
            check_number(media, num_pieces)
            yield _gif_piece(control, head, (at + 8, file.tell() - at - 8))
            control = _NO_CONTROL
        elif head[:2] == b"\xf9\x04":
            control = b"!" + head[:6] + b"\0"


def _gif_piece(control: bytes, place: bytes, span: tuple[int, int]) -> StoredFrame:
    flags, hundredths = struct.unpack("<BH", control[3:6])
    disposal = _GIF_DISPOSALS.get(flags >> 2 & 7, "keep")
    x, y, width, height = struct.unpack("<HHHH", place[:8])
    delay_s = shown_for_s(hundredths / 100)
    return StoredFrame((span,), x, y, width, height, delay_s, True, disposal, control)


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _skip_blocks(file: Reader, size_bytes: int) -> bool:
    """Skips parts up to the empty one. Returns whether that one is there."""
    while (length := file.read(1)) not in (b"", b"\0"):
        file.seek(length[0], 1)
    return length == b"\0" and file.tell() <= size_bytes


def _gif(flags: int, palette: bytes, piece: StoredFrame, data: bytes) -> bytes:
    size = struct.pack("<HH", piece.width, piece.height)
    place = b",\0\0\0\0" + size
    return b"GIF89a" + size + bytes([flags, 0, 0]) + palette + piece.control + place + data + b";"


# PNG: chunks; fcTL describes the frame whose pixels follow in IDAT or fdAT


def _find_png(file: Reader, media: Media) -> Animation | None:
    found = _PngFrames(media)
    offset = len(_PNG)
    while len(head := _read(file, offset, 8)) == 8:
        length, name = struct.unpack(">I4s", head)
        offset += 8
        if offset + length + 4 > media.size_bytes or name == b"IEND":
            break
        if name == b"IDAT" and not found.is_animated:
            return None
        found.take(name, offset, length, file)
        offset += length + 4
    found.end_frame()
    return _animation(found.size, found.pieces, found.alone)


class _PngFrames:
    """Collects the frames of a PNG from its chunks, in order."""

    def __init__(self, media: Media) -> None:
        self.pieces: list[StoredFrame] = []
        self.is_animated = False
        self.size = (0, 0)  # height, width
        self._media = media
        self._header = b""
        self._kept: dict[bytes, bytes] = {}  # chunks that each frame needs
        self._piece: StoredFrame | None = None
        self._spans: list[tuple[int, int]] = []  # of its pixels

    def take(self, name: bytes, offset: int, length: int, file: Reader) -> None:
        """Takes a chunk. offset: of its data, where `file` stands."""
        if name == b"IHDR" and length == 13:
            self._header = file.read(13)
            self.size = struct.unpack(">II", self._header[:8])[::-1]
        elif name in (b"PLTE", b"tRNS") and length <= _MAX_KEPT_BYTES:
            self._kept[name] = _chunk(name, file.read(length))
        elif name == b"acTL":
            self.is_animated = True
        elif name == b"fcTL" and length == 26:
            self.end_frame()
            self._piece = _png_piece(file.read(26))
        elif name == b"IDAT":
            self._spans.append((offset, length))
        elif name == b"fdAT" and length > 4:
            self._spans.append((offset + 4, length - 4))

    def end_frame(self) -> None:
        """Keeps the frame that is begun; pixels before any frame are those of the still picture."""
        if self._piece and self._spans:
            check_number(self._media, len(self.pieces) + 1)
            self.pieces.append(replace(self._piece, spans=tuple(self._spans)))
        self._piece, self._spans = None, []

    def alone(self, piece: StoredFrame, data: bytes) -> bytes:
        size = struct.pack(">II", piece.width, piece.height)
        header = _chunk(b"IHDR", size + self._header[8:])
        kept = b"".join(self._kept.values())
        return _PNG + header + kept + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _png_piece(control: bytes) -> StoredFrame:
    width, height, x, y, part, parts, disposal, blend = struct.unpack(">IIIIHHBB", control[4:])
    delay_s = shown_for_s(part / (parts or 100))
    return StoredFrame((), x, y, width, height, delay_s, blend == 1, _PNG_DISPOSALS.get(disposal, "keep"))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


# WebP: chunks of RIFF; ANMF has a frame's place and, as chunks again, its pixels


def _find_webp(file: Reader, media: Media) -> Animation | None:
    pieces: list[StoredFrame] = []
    size = (0, 0)
    offset = _FILE_HEADER
    while len(head := _read(file, offset, _CHUNK_HEADER)) == _CHUNK_HEADER:
        name, length = struct.unpack("<4sI", head)
        offset += _CHUNK_HEADER
        if offset + length > media.size_bytes:
            break
        if name == b"VP8X" and length >= 10:
            body = file.read(10)
            size = (_three(body, 7) + 1, _three(body, 4) + 1)
        elif name == b"ANMF" and length > _FRAME_HEADER:
            check_number(media, len(pieces) + 1)
            span = (offset + _FRAME_HEADER, length - _FRAME_HEADER)
            pieces.append(_webp_piece(file.read(_FRAME_HEADER), span))
        offset += length + length % 2
    return _animation(size, pieces, _webp)


def _three(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 3], "little")


def _webp_piece(head: bytes, span: tuple[int, int]) -> StoredFrame:
    x, y, width, height, delay_ms = (_three(head, place) for place in range(0, 15, 3))
    return StoredFrame(
        (span,),
        2 * x,
        2 * y,
        width + 1,
        height + 1,
        shown_for_s(delay_ms / 1000),
        not head[15] & 2,
        "clear" if head[15] & 1 else "keep",
    )


def _webp(piece: StoredFrame, data: bytes) -> bytes:
    has_alpha = data[:4] in (b"ALPH", b"VP8L")
    size = (piece.width - 1).to_bytes(3, "little") + (piece.height - 1).to_bytes(3, "little")
    extended = b"VP8X" + struct.pack("<IB3x", 10, 0x10 if has_alpha else 0) + size
    body = b"WEBP" + extended + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


_FORMATS: tuple[tuple[Callable[[bytes], bool], Callable[[Reader, Media], Animation | None]], ...] = (
    (lambda head: head[:6] in (b"GIF87a", b"GIF89a"), _find_gif),
    (lambda head: head[:8] == _PNG, _find_png),
    (lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP", _find_webp),
)
