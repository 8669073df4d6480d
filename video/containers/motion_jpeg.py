"""Tells a stream of JPEGs, which is a video, from a JPEG that has others behind it, which is an image.

stream      FFD8 ... FFD9 | FFD8 ... FFD9 | FFD8 ... FFD9       pictures of one size, and nothing between
image       FFD8 ... MPF ... FFD9 | FFD8 ... FFD9               a preview or a map of light, which MPF lists
"""

from __future__ import annotations

from epd.video.sources.source import Media

_MAX_PICTURE_BYTES = 16 << 20  # of the first two pictures
_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset(range(0xD0, 0xD9)) | {0x00, 0x01, 0xFF}


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
