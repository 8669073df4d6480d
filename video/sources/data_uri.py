"""Decodes the bytes of a `data:` URI piece by piece, in time linear in its length.

Base64 is read as the standards of data: URLs say (fetch.spec.whatwg.org, "forgiving-base64" of
infra.spec.whatwg.org): with white space anywhere, percent-encoded, with or without its padding. The alphabet
for names of files (`-` and `_`), which is not in the standard, is read too: no text means both.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, unquote_to_bytes

from epd.data_uri import head_of, num_listed_frames
from epd.errors import MediaLimitError, UnsupportedMediaError
from epd.video.sources.frame_list import MAGIC, length_field
from epd.video.sources.local_files import check_size
from epd.video.sources.policy import Sink

# Percent-encoding is decoded in Python, a third of a microsecond for each character.
MAX_PERCENT_CHARS = 1 << 20
_PIECE_CHARS = 4 << 18  # base64 is decoded in pieces of whole quadruples
_SPACE = "\t\n\f\r "
# What senders percent-encode in base64; and white space and the other alphabet, as they are read.
_ESCAPES = {f"%{ord(char):02{case}}": char for char in f"+/={_SPACE}" for case in "Xx"}
_WRITTEN = {**dict.fromkeys(_SPACE, ""), "-": "+", "_": "/"}


def read_data_uri(uri: str, max_bytes: int, sink: Sink) -> None:
    """Writes what a `data:` URI holds to the sink; of a list of frames, a file as `frame_list` describes it.

    Raises UnsupportedMediaError, MediaLimitError, and what the sink raises.
    """
    head = head_of(uri)
    if head is None:
        raise UnsupportedMediaError(
            "received a data: URI without a comma; allowed data:TYPE;base64,DATA; use that form"
        )
    if head.lists_frames:
        _read_list(uri, head.start, max_bytes, sink)
    elif head.is_base64:
        _read_base64(uri, head.start, max_bytes, sink)
    else:
        _read_percent(uri, head.start, max_bytes, sink)


def _read_list(uri: str, start: int, max_bytes: int, sink: Sink) -> None:
    sink.write(MAGIC)
    num_bytes = 0
    for number in range(num_listed_frames(uri)):
        end = uri.find(",", start)
        text = _unpadded(uri[start : len(uri) if end < 0 else end])
        start = end + 1
        num_bytes += _num_decoded(text)
        check_size("the data: URI", num_bytes, max_bytes)
        try:
            _write_frame(text, sink)
        except UnsupportedMediaError as error:
            raise UnsupportedMediaError(f"frame {number}: {error}") from error


def _write_frame(text: str, sink: Sink) -> None:
    if not text:
        raise UnsupportedMediaError("received no bytes; allowed: an image in base64; remove its comma")
    sink.write(length_field(_num_decoded(text)))
    for piece in _pieces(text):
        sink.write(piece)


def _num_decoded(text: str) -> int:
    """Returns the number of bytes that base64 without padding stands for."""
    return len(text) * 3 // 4


def _read_base64(uri: str, start: int, max_bytes: int, sink: Sink) -> None:
    text = _unpadded(uri[start:].partition("#")[0])  # a fragment is no part of a URL's resource
    check_size("the data: URI", _num_decoded(text), max_bytes)
    sink.expect(_num_decoded(text))
    for piece in _pieces(text):
        sink.write(piece)


def _unpadded(text: str) -> str:
    """Returns the characters of base64 that a text holds, however they are written, without padding."""
    if "%" in text:
        text = _unquoted(text)
    text = _replaced(text, _WRITTEN)
    if len(text) % 4 == 0 and text.endswith("="):
        text = text[: -2 if text.endswith("==") else -1]
    return text


def _unquoted(text: str) -> str:
    """Decodes percent-encoding. Raises MediaLimitError for a long text with what nobody needs to encode."""
    text = _replaced(text, _ESCAPES)
    if "%" not in text:
        return text
    if len(text) > MAX_PERCENT_CHARS:
        raise MediaLimitError(
            f"received {len(text)} characters of percent-encoded base64; allowed {MAX_PERCENT_CHARS}; "
            "send it as base64 alone"
        )
    return unquote(text)


def _replaced(text: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        text = text.replace(old, new)
    return text


def _pieces(text: str) -> Iterator[bytes]:
    try:
        for place in range(0, len(text), _PIECE_CHARS):
            piece = text[place : place + _PIECE_CHARS]
            if "=" in piece:
                raise ValueError("padding that does not end it")
            yield binascii.a2b_base64(piece + "=" * (-len(piece) % 4), strict_mode=True)
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
