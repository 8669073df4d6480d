"""Reads the boxes of HEIF that say what images a file holds and how they are put together (ISO/IEC 23008-12).

meta | pitm: the image that is meant | iinf: kinds of items | iloc: where their bytes are
     | iref: what is made of what    | iprp: size, decoder, turn, mirror, crop
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

from epd.errors import CorruptMediaError, MediaLimitError, UnsupportedMediaError
from epd.video.sources.source import Media

# Brands of files whose images are HEVC or, as the general ones, anything; AVIF has brands of its own.
_BRANDS = frozenset(
    {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
)
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_MAX_TOP_BOXES = 64
_MAX_META_BYTES = 16 << 20
_MAX_ITEMS = 1 << 16


class Bytes:
    """Reads numbers, big-endian, from a box. Raises struct.error at its end."""

    def __init__(self, data: bytes, place: int = 0) -> None:
        self.data, self.place = data, place

    def number(self, num_bytes: int) -> int:
        """Reads an unsigned number of any length, 0 bytes being 0."""
        return int.from_bytes(self.take(num_bytes), "big")

    def take(self, num_bytes: int) -> bytes:
        part = self.data[self.place : self.place + num_bytes]
        if len(part) < num_bytes:
            raise struct.error(f"{num_bytes} bytes wanted, {len(part)} are left")
        self.place += num_bytes
        return part

    def boxes(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields (type, content) of all boxes that are left."""
        while self.place < len(self.data):
            length, kind = self.number(4), self.take(4)
            length = self.number(8) - 8 if length == 1 else length or len(self.data) - self.place + 8
            yield kind, self.take(length - 8)

    def versioned(self) -> int:
        """Reads the version and the flags of a full box, as one number: 8 bits and 24."""
        return self.number(4)


@dataclass(frozen=True, slots=True)
class Extents:
    """Where the bytes of an item are: (offset, bytes) of each part.

    method: 0 in the file, 1 within `idat`
    """

    method: int
    spans: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class HeifItems:
    """What the boxes of a file say.

    kinds: type of each item, such as hvc1 or grid
    made_of: by (kind of reference, item), the items that it names
    properties: of each item, (type, content) in the order in which they apply
    idat: bytes of items that are kept within the boxes
    """

    primary: int = 0
    kinds: dict[int, str] = field(default_factory=dict)
    places: dict[int, Extents] = field(default_factory=dict)
    made_of: dict[tuple[bytes, int], tuple[int, ...]] = field(default_factory=dict)
    properties: dict[int, tuple[tuple[bytes, bytes], ...]] = field(default_factory=dict)
    idat: bytes = b""

    def first(self, item: int, kind: bytes) -> bytes | None:
        """Returns the content of an item's property; None without one."""
        return next((content for name, content in self.properties.get(item, ()) if name == kind), None)

    def sources(self, item: int) -> tuple[int, ...]:
        """Returns the images that an item is put together from, in their order."""
        return self.made_of.get((b"dimg", item), ())

    def data(self, media: Media, item: int) -> bytes:
        """Returns the bytes of an item. Raises CorruptMediaError, UnsupportedMediaError."""
        place = self.places.get(item)
        if place is None or place.method > 1:
            raise UnsupportedMediaError(
                f"{media.name} keeps image {item} in a way that cannot be read; convert it to JPEG or PNG"
            )
        whole = self.idat if place.method == 1 else None
        data = bytearray()
        for span in place.spans:
            data += _span(media, whole, *span)
            if len(data) > media.size_bytes:
                raise CorruptMediaError(
                    f"{media.name} names bytes twice; allowed: intact files; copy it again"
                )
        return bytes(data)


def _span(media: Media, whole: bytes | None, offset: int, num_bytes: int) -> bytes:
    size = media.size_bytes if whole is None else len(whole)
    num_bytes = num_bytes or size - offset
    if num_bytes <= 0 or offset + num_bytes > size:
        raise CorruptMediaError(f"{media.name} ends within its image; allowed: complete files; copy it again")
    if whole is not None:
        return whole[offset : offset + num_bytes]
    with closing(media.reader()) as file:
        file.seek(offset)
        return file.read(num_bytes)


def is_heif(media: Media) -> bool:
    """Returns whether a file is a still picture of HEIF. AVIF, and sequences without a still, are none."""
    head = media.head(256)
    if head[4:8] != b"ftyp":
        return False
    brands = {head[8:12]} | {
        head[at : at + 4] for at in range(16, min(len(head), int.from_bytes(head[:4])), 4)
    }
    return bool(brands & _BRANDS) and not brands & _AVIF_BRANDS and _meta_place(media) is not None


def _meta_place(media: Media) -> tuple[int, int] | None:
    """Returns (offset, bytes) of the content of the file's meta box."""
    offset = 0
    with closing(media.reader()) as file:
        for _ in range(_MAX_TOP_BOXES):
            file.seek(offset)
            head = file.read(16)
            length, kind = int.from_bytes(head[:4], "big"), head[4:8]
            start = 16 if length == 1 else 8
            length = int.from_bytes(head[8:16], "big") if length == 1 else length or media.size_bytes - offset
            if length < start or len(head) < start:
                return None
            if kind == b"meta":
                return offset + start, length - start
            offset += length
    return None


def read_items(media: Media) -> HeifItems:
    """Reads the boxes of a file that `is_heif`. Raises CorruptMediaError, MediaLimitError."""
    offset, num_bytes = _meta_place(media) or (0, 0)
    if num_bytes > _MAX_META_BYTES:
        raise MediaLimitError(
            f"{media.name} describes its images in {num_bytes} bytes; allowed {_MAX_META_BYTES}; convert it"
        )
    with closing(media.reader()) as file:
        file.seek(offset)
        boxes = Bytes(file.read(num_bytes))
    items = HeifItems()
    try:
        boxes.versioned()
        for kind, content in boxes.boxes():
            if kind in _READERS:
                _READERS[kind](items, Bytes(content))
    except (struct.error, ValueError) as error:
        raise CorruptMediaError(
            f"{media.name} has a damaged header ({error}); allowed: complete images; copy it again"
        ) from error
    return items


def _count(number: int) -> range:
    """Returns what many items are counted by. Raises ValueError for more than there may be."""
    if number > _MAX_ITEMS:
        raise ValueError(f"{number} items, allowed {_MAX_ITEMS}")
    return range(number)


def _read_primary(items: HeifItems, box: Bytes) -> None:
    items.primary = box.number(4 if box.versioned() >> 24 else 2)


def _read_kinds(items: HeifItems, box: Bytes) -> None:
    num_items = box.number(4 if box.versioned() >> 24 else 2)
    entries = box.boxes()
    for _, (_, content) in zip(_count(num_items), entries, strict=False):
        entry = Bytes(content)
        version = entry.versioned() >> 24
        item = entry.number(4 if version == 3 else 2)
        entry.number(2)
        items.kinds[item] = entry.take(4).decode("latin-1")


def _read_places(items: HeifItems, box: Bytes) -> None:
    version = box.versioned() >> 24
    sizes, more = box.number(1), box.number(1)
    offset_size, length_size, base_size, index_size = sizes >> 4, sizes & 15, more >> 4, more & 15
    for _ in _count(box.number(4 if version == 2 else 2)):
        item = box.number(4 if version == 2 else 2)
        method = box.number(2) & 15 if version else 0
        external = box.number(2)
        base = box.number(base_size)
        num_spans = box.number(2)
        if num_spans > 1 and not offset_size + length_size:
            raise ValueError(f"{num_spans} parts of an image without places")
        spans = []
        for _ in range(num_spans):
            box.number(index_size if version else 0)
            spans.append((base + box.number(offset_size), box.number(length_size)))
        items.places[item] = Extents(2 if external else method, tuple(spans))


def _read_references(items: HeifItems, box: Bytes) -> None:
    size = 4 if box.versioned() >> 24 else 2
    for kind, content in box.boxes():
        entry = Bytes(content)
        item = entry.number(size)
        items.made_of[kind, item] = tuple(entry.number(size) for _ in range(entry.number(2)))


def _read_properties(items: HeifItems, box: Bytes) -> None:
    found: list[tuple[bytes, bytes]] = []
    for kind, content in box.boxes():
        if kind == b"ipco":
            found = list(Bytes(content).boxes())
        elif kind == b"ipma":
            _read_associations(items, Bytes(content), found)


def _read_associations(items: HeifItems, box: Bytes, found: list[tuple[bytes, bytes]]) -> None:
    head = box.versioned()
    size, is_wide = (4 if head >> 24 else 2), head & 1
    for _ in _count(box.number(4)):
        item = box.number(size)
        numbers = [box.number(2) & 0x7FFF if is_wide else box.number(1) & 0x7F for _ in range(box.number(1))]
        items.properties[item] = tuple(found[number - 1] for number in numbers if 0 < number <= len(found))


def _read_idat(items: HeifItems, box: Bytes) -> None:
    items.idat = box.data


_READERS = {
    b"pitm": _read_primary,
    b"iinf": _read_kinds,
    b"iloc": _read_places,
    b"iref": _read_references,
    b"iprp": _read_properties,
    b"idat": _read_idat,
}
