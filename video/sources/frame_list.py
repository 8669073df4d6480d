"""Keeps frames that a client has extracted from a video, as encoded images, in one file.

    | MAGIC | length | image 0 | length | image 1 | ...      length: 8 bytes, little-endian

The file is a video like any other: frame n is on screen during [n, n + 1) s. When the frames were on screen
in the video that they come from, the request says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing

from epd.errors import CorruptMediaError, MediaLimitError
from epd.video.sources.source import Media

MAGIC = b"EPD frame list 1\n"
MAX_LISTED_FRAMES = 1 << 16
LIST_FPS = 1.0
_LENGTH = struct.Struct("<Q")


def length_field(num_bytes: int) -> bytes:
    """Returns what stands before an image of that many bytes."""
    return _LENGTH.pack(num_bytes)


def is_frame_list(media: Media) -> bool:
    """Returns whether a file begins as a list of frames does."""
    return media.head(len(MAGIC)) == MAGIC


class FrameList:
    """Finds the frames of a list. For one thread at a time."""

    def __init__(self, media: Media) -> None:
        """Reads where the frames are. Raises CorruptMediaError, MediaLimitError."""
        self._media = media
        self._places = list(_places(media))
        if not self._places:
            raise CorruptMediaError(f"{media.name} lists no frame; allowed: 1 or more; send them")

    def __len__(self) -> int:
        return len(self._places)

    def frame(self, index: int) -> Media:
        """Returns a frame, as an image that is named by its number. Raises CorruptMediaError."""
        offset, num_bytes = self._places[index]
        with closing(self._media.reader()) as file:
            file.seek(offset)
            return Media(file.read(num_bytes), f"{self._media.name}, frame {index}")


def _places(media: Media) -> Iterator[tuple[int, int]]:
    """Yields (offset, length) of every image."""
    offset = len(MAGIC)
    with closing(media.reader()) as file:
        for _ in range(MAX_LISTED_FRAMES + 1):
            file.seek(offset)
            field = file.read(_LENGTH.size)
            if not field:
                return
            length = _LENGTH.unpack(field)[0] if len(field) == _LENGTH.size else 0
            offset += _LENGTH.size
            if not 0 < length <= media.size_bytes - offset:
                raise CorruptMediaError(
                    f"{media.name} ends within a frame; allowed: whole lists; send it again"
                )
            yield offset, length
            offset += length
    raise MediaLimitError(f"{media.name} lists more than {MAX_LISTED_FRAMES} frames; send fewer")
