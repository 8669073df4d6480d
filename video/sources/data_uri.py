"""Decodes the bytes of a `data:` URI piece by piece, in time linear in its length."""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from epd.errors import MediaLimitError, UnsupportedMediaError
from video.sources.frame_list import MAGIC, length_field
from video.sources.local_files import check_size
from video.sources.policy import Sink

# Percent-encoding is decoded in Python, a third of a microsecond for each character.
MAX_PERCENT_CHARS = 1 << 20
_BASE64 = ";base64"
# How vLLM's clients send extracted frames: the images follow, separated by commas.
_LIST = "data:video/jpeg;base64,"
_PIECE_CHARS = 4 << 18  # base64 is decoded in pieces of whole quadruples
# The only characters of base64 that senders percent-encode.
_ESCAPES = (("%2B", "+"), ("%2b", "+"), ("%2F", "/"), ("%2f", "/"), ("%3D", "="), ("%3d", "="))


def num_listed_frames(uri: str) -> int:
    """Returns the number of frames in a `data:` URI that lists them; 0 for any other medium."""
    return uri.count(",") if _is_list(uri) else 0


def _is_list(uri: str) -> bool:
    return uri[: len(_LIST)].lower() == _LIST


def read_data_uri(uri: str, max_bytes: int, sink: Sink) -> None:
    """Writes what a `data:` URI holds to the sink; of a list of frames, a file as `frame_list` describes it.

    Raises UnsupportedMediaError, MediaLimitError, and what the sink raises.
    """
    if _is_list(uri):
        return _read_list(uri, max_bytes, sink)
    comma = uri.find(",")
    if comma < 0:
        raise UnsupportedMediaError(
            "received a data: URI without a comma; allowed data:TYPE;base64,DATA; use that form"
        )
    if uri[max(0, comma - len(_BASE64)) : comma].lower() == _BASE64:
        _read_base64(uri, comma + 1, max_bytes, sink)
    else:
        _read_percent(uri, comma + 1, max_bytes, sink)
    return None


def _read_list(uri: str, max_bytes: int, sink: Sink) -> None:
    check_size("the data: URI", (len(uri) - len(_LIST)) // 4 * 3 - 2, max_bytes)
    sink.write(MAGIC)
    start = len(_LIST)
    for number in range(num_listed_frames(uri)):
        end = uri.find(",", start)
        text = _unescaped(uri[start : len(uri) if end < 0 else end])
        start = end + 1
        try:
            _write_frame(text, sink)
        except UnsupportedMediaError as error:
            raise UnsupportedMediaError(f"frame {number}: {error}") from error


def _write_frame(text: str, sink: Sink) -> None:
    if not text:
        raise UnsupportedMediaError("received no bytes; allowed: an image in base64; remove its comma")
    sink.write(length_field(_num_decoded(text)))
    for piece in _pieces(text, 0):
        sink.write(piece)


def _num_decoded(text: str, start: int = 0) -> int:
    """Returns the number of bytes that base64 from `start` on stands for."""
    return max(0, (len(text) - start) // 4 * 3 - text.endswith("=") - text.endswith("=="))


def _read_base64(uri: str, start: int, max_bytes: int, sink: Sink) -> None:
    check_size("the data: URI", (len(uri) - start) // 4 * 3 - 2, max_bytes)
    text, start = (_unescaped(uri[start:]), 0) if "%" in uri else (uri, start)
    num_bytes = 0
    sink.expect(_num_decoded(text, start))
    for piece in _pieces(text, start):
        num_bytes += len(piece)
        check_size("the data: URI", num_bytes, max_bytes)
        sink.write(piece)


def _unescaped(text: str) -> str:
    if "%" not in text:
        return text
    for escape, char in _ESCAPES:
        text = text.replace(escape, char)
    return text


def _pieces(text: str, start: int) -> Iterator[bytes]:
    try:
        for place in range(start, len(text), _PIECE_CHARS):
            piece = text[place : place + _PIECE_CHARS]
            if "=" in piece and place + _PIECE_CHARS < len(text):
                raise ValueError("padding before its end")
            yield binascii.a2b_base64(piece, strict_mode=True)
    except ValueError as error:  # binascii.Error is one
        raise UnsupportedMediaError(
            f"received a data: URI that is not base64 ({error}); allowed: base64; encode it"
        ) from error


def _read_percent(uri: str, start: int, max_bytes: int, sink: Sink) -> None:
    if len(uri) - start > MAX_PERCENT_CHARS:
        raise MediaLimitError(
            f"received a data: URI of {len(uri) - start} characters without base64; "
            f"allowed {MAX_PERCENT_CHARS}; encode it as base64"
        )
    data = unquote_to_bytes(uri[start:])
    check_size("the data: URI", len(data), max_bytes)
    sink.expect(len(data))
    sink.write(data)
