"""Writes pictures byte by byte, so that tests know what is in them whatever libraries make of it."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import av
import numpy as np
from PIL import Image

from epd.types import UInt8Array
from tests.scheduling import as_before

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6  # colour types of PNG
KEEP, CLEAR, RESTORE = 0, 1, 2  # disposals of PNG


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header(width: int, height: int, depth: int, colour_type: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0))


def packed(rows: Sequence[bytes]) -> bytes:
    return zlib.compress(b"".join(b"\0" + row for row in rows))


def png(
    size: tuple[int, int], depth: int, colour_type: int, rows: Sequence[bytes], *more: tuple[bytes, bytes]
) -> bytes:
    """A PNG. size: (width, height). rows: packed samples. more: chunks before the pixels."""
    extra = b"".join(chunk(*each) for each in more)
    pixels = chunk(b"IDAT", packed(rows))
    return b"\x89PNG\r\n\x1a\n" + header(*size, depth, colour_type) + extra + pixels + chunk(b"IEND", b"")


@dataclass(frozen=True)
class Part:
    """A frame of an animation. pixels: uint8 [h, w, 4]; of a GIF alpha is 0 or 255."""

    pixels: UInt8Array
    x: int = 0
    y: int = 0
    delay_ms: int = 100
    disposal: int = KEEP
    is_blended: bool = True


def apng(
    size: tuple[int, int],
    parts: Sequence[Part],
    *more: tuple[bytes, bytes],
    default: UInt8Array | None = None,
) -> bytes:
    """An animated PNG with 8 bits RGBA. default: what shows where only the first picture is read."""
    body = [b"\x89PNG\r\n\x1a\n", header(*size, 8, RGBA), chunk(b"acTL", struct.pack(">II", len(parts), 0))]
    body += [chunk(*each) for each in more]
    if default is not None:
        body.append(chunk(b"IDAT", packed([row.tobytes() for row in default])))
    number = 0
    for part in parts:
        height, width = part.pixels.shape[:2]
        control = struct.pack(
            ">IIIIIHHBB",
            number,
            width,
            height,
            part.x,
            part.y,
            part.delay_ms,
            1000,
            part.disposal,
            part.is_blended,
        )
        body.append(chunk(b"fcTL", control))
        data = packed([row.tobytes() for row in part.pixels])
        is_first = number == 0 and default is None
        number += 1 if is_first else 2
        body.append(
            chunk(b"IDAT", data) if is_first else chunk(b"fdAT", struct.pack(">I", number - 1) + data)
        )
    return b"".join(body) + chunk(b"IEND", b"")


def lzw(indices: bytes) -> bytes:
    """Codes of 9 bits, never compressed: the table is cleared before they would grow."""
    codes: list[int] = []
    for place, index in enumerate(indices):
        if place % 200 == 0:
            codes.append(256)
        codes.append(index)
    bits = sum(code << 9 * place for place, code in enumerate([*codes, 257]))
    data = bits.to_bytes((9 * (len(codes) + 1) + 7) // 8, "little")
    blocks = [data[at : at + 255] for at in range(0, len(data), 255)]
    return b"\x08" + b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"


def gif(size: tuple[int, int], parts: Sequence[Part], *, background: int = 1, loops: int | None = 0) -> bytes:
    """A GIF whose frames have palettes of their own. background: an index that must never show."""
    body = b"GIF89a" + struct.pack("<HHBBB", *size, 0x80, background, 0) + bytes([9, 9, 9, 255, 0, 255])
    if loops is not None:
        body += b"!\xff\x0bNETSCAPE2.0\x03\x01" + struct.pack("<H", loops) + b"\0"
    for part in parts:
        height, width = part.pixels.shape[:2]
        colours = [tuple(each) for each in np.unique(part.pixels.reshape(-1, 4), axis=0).tolist()]
        hidden = [place for place, colour in enumerate(colours) if colour[3] == 0]
        flags = part.disposal + 1 << 2 | bool(hidden)
        clear = hidden[0] if hidden else 0
        body += b"!\xf9\x04" + struct.pack("<BHB", flags, part.delay_ms // 10, clear) + b"\0"
        body += b"," + struct.pack("<HHHHB", part.x, part.y, width, height, 0x87)
        palette = b"".join(bytes(colour[:3]) for colour in colours)
        indices = bytes(colours.index(tuple(each)) for each in part.pixels.reshape(-1, 4).tolist())
        body += palette.ljust(768, b"\0") + lzw(indices)
    return body + b";"


def webp(size: tuple[int, int], parts: Sequence[Part], exif: bytes = b"") -> bytes:
    """An animated WebP, lossless. Disposal is KEEP or CLEAR."""

    def three(number: int) -> bytes:
        return number.to_bytes(3, "little")

    flags = 0x12 | (8 if exif else 0)
    body = riff(b"VP8X", struct.pack("<I", flags) + three(size[0] - 1) + three(size[1] - 1))
    body += riff(b"ANIM", struct.pack("<IH", 0xFF00FFFF, 0))
    for part in parts:
        file = io.BytesIO()
        Image.fromarray(part.pixels).save(file, "WEBP", lossless=True, exact=True)
        places = (part.x // 2, part.y // 2, part.pixels.shape[1] - 1, part.pixels.shape[0] - 1, part.delay_ms)
        how = (part.disposal == CLEAR) | (0 if part.is_blended else 2)
        body += riff(b"ANMF", b"".join(map(three, places)) + bytes([how]) + still(file.getvalue()))
    body += riff(b"EXIF", exif) if exif else b""
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def riff(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def still(file: bytes) -> bytes:
    """The chunks of a still WebP that are its pixels."""
    return file[file.index(b"VP8L") :]


def drawn(size: tuple[int, int], parts: Sequence[Part], ground: int = 255) -> list[UInt8Array]:
    """What is on screen during each frame, by the formats' words in floats: uint8 [H, W, 3]."""
    canvas = np.zeros((size[1], size[0], 4))  # premultiplied
    shown = []
    for part in parts:
        before = canvas.copy()
        height, width = part.pixels.shape[:2]
        place = canvas[part.y : part.y + height, part.x : part.x + width]
        new = part.pixels / 255.0
        new[..., :3] *= new[..., 3:]
        place[...] = new + place * (1 - new[..., 3:]) if part.is_blended else new
        shown.append(np.rint(canvas[..., :3] * 255 + ground * (1 - canvas[..., 3:])).astype(np.uint8))
        if part.disposal == CLEAR:
            place[...] = 0
        elif part.disposal == RESTORE:
            canvas = before
    return shown


# HEIF


def coded(pixels: UInt8Array, codec: str = "libx265", pixel_format: str = "yuv444p") -> tuple[bytes, bytes]:
    """One picture, coded: (the decoder's configuration, the data), as MP4 and HEIF have them."""
    file = io.BytesIO()
    options = {"x265-params": "log-level=none:keyint=1:crf=1"} if codec == "libx265" else {"crf": "1"}
    with as_before(), av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=1, options=options)
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], pixel_format
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    with av.open(io.BytesIO(file.getvalue())) as container:
        stream = container.streams.video[0]
        packet = next(packet for packet in container.demux(stream) if packet.size)
        assert stream.codec_context.extradata is not None
        return bytes(stream.codec_context.extradata), bytes(packet)


def box(kind: bytes, *content: bytes) -> bytes:
    data = b"".join(content)
    return struct.pack(">I", len(data) + 8) + kind + data


def full(kind: bytes, *content: bytes, version: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24), *content)


def ispe(width: int, height: int) -> bytes:
    return full(b"ispe", struct.pack(">II", width, height))


@dataclass(frozen=True)
class Item:
    """An item of HEIF.

    properties: whole boxes
    made_of: (kind of reference, items by their numbers from 1)
    """

    kind: bytes
    data: bytes
    properties: tuple[bytes, ...]
    made_of: tuple[tuple[bytes, tuple[int, ...]], ...] = ()


def heif(items: Sequence[Item], primary: int = 1, brand: bytes = b"heic") -> bytes:
    """A file of HEIF: items are numbered from 1, and their data lie in the file after the boxes."""
    numbers = range(1, len(items) + 1)
    infos = [
        full(b"infe", struct.pack(">HH", number, 0), item.kind, b"\0", version=2)
        for number, item in zip(numbers, items, strict=True)
    ]
    references = [
        box(kind, struct.pack(f">HH{len(sources)}H", number, len(sources), *sources))
        for number, item in zip(numbers, items, strict=True)
        for kind, sources in item.made_of
    ]
    properties = [each for item in items for each in item.properties]
    links, first = b"", 1
    for number, item in zip(numbers, items, strict=True):
        places = range(first, first + len(item.properties))
        links += struct.pack(">HB", number, len(places)) + b"".join(
            struct.pack(">H", 0x8000 | at) for at in places
        )
        first = places.stop
    head = box(b"ftyp", brand, bytes(4), b"mif1", brand)

    def meta(start: int) -> bytes:
        spans = b""
        for number, item in zip(numbers, items, strict=True):
            spans += struct.pack(">HHHII", number, 0, 1, start, len(item.data))
            start += len(item.data)
        return full(
            b"meta",
            full(b"hdlr", bytes(4) + b"pict" + bytes(13)),
            full(b"pitm", struct.pack(">H", primary)),
            full(b"iinf", struct.pack(">H", len(items)), *infos),
            full(b"iloc", b"\x44\0" + struct.pack(">H", len(items)), spans),
            full(b"iref", *references) if references else b"",
            box(
                b"iprp",
                box(b"ipco", *properties),
                box(b"ipma", struct.pack(">II", 1, len(items)), links),
            ),
        )

    start = len(head) + len(meta(0)) + 8
    return head + meta(start) + box(b"mdat", *(item.data for item in items))
