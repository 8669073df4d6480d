"""Reads the boxes of an MP4 without FFmpeg: their headers, and what little of their bodies is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from epd.video.sources.source import Media, Reader

# Boxes that are read; a day in fragments of a second has more, and says little in each.
MAX_BOXES = 20_000
_FIRST_BOXES = (b"ftyp", b"moov", b"moof", b"styp", b"mdat", b"free", b"wide", b"skip")


@dataclass(slots=True)
class BoxWalk:
    """file: at any position. num_left: boxes that may still be read."""

    file: Reader
    num_left: int = MAX_BOXES

    def boxes(self, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
        """Yields (name, start of the body, end) of the boxes between two places, cut at the second."""
        while start + 8 <= stop and self.num_left > 0:
            self.num_left -= 1
            name, body, end = self._box(start, stop)
            yield name, body, end
            if end <= start:
                return
            start = end

    def read(self, start: int, num_bytes: int) -> bytes:
        """Returns bytes of the file, fewer at its end."""
        self.file.seek(start, os.SEEK_SET)
        return self.file.read(num_bytes)

    def _box(self, start: int, stop: int) -> tuple[bytes, int, int]:
        head = self.read(start, 16)
        size, name, body = uint32(head[:4]), head[4:8], start + 8
        if size == 1:
            size, body = int.from_bytes(head[8:16]), start + 16
        return name, body, min(stop, start + size) if size else stop


def has_boxes(media: Media) -> bool:
    """Returns whether a medium begins like an MP4."""
    return media.head(8)[4:8] in _FIRST_BOXES


def uint32(data: bytes) -> int:
    """Returns a number as boxes hold it."""
    return int.from_bytes(data[:4])
