"""Identifies every token of a request, so that only equal tokens share keys and values.

One row of three int64 per token:

    text             (token id,               0,          0         )
    visual token     (-(index in unit) - 1,   digest_hi,  digest_lo )

The first row of a prompt with a cache salt has the salt's digest beside its token: prefixes begin with it, so
nothing is shared with prompts of another salt or none.

A text row never begins with a negative number and a visual row always does, so the two cannot be confused.
The digest names all that the unit's embeddings depend on: bytes of the media, times, size, grid, spans,
reduction. Tokens of media that attend each other, and what lies between, have the digest of all of these in
its place, texts too: `as_one`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from epd.types import Int64Array, PlaceholderRange

ROW_COLUMNS = 3
ROW_BYTES = 8 * ROW_COLUMNS
DIGEST_BYTES = 16
_LEAST_CAPACITY = 64


class TokenIdentity:
    """Holds the rows of one request, int64 [T, 3]; generated tokens are appended, old rows never change."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, rows: Int64Array) -> None:
        if rows.ndim != 2 or rows.shape[1] != ROW_COLUMNS or rows.dtype != np.int64:
            raise ValueError(f"identity rows must be int64 [T, {ROW_COLUMNS}], got {rows.dtype} {rows.shape}")
        self._length = len(rows)
        self._buffer = _with_room(rows)

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Int64Array:
        """Returns a view of the rows, int64 [T, 3], for reading."""
        return self._buffer[: self._length]

    def append(self, token_id: int) -> None:
        """Adds one text token, in constant time."""
        if self._length == len(self._buffer):
            self._buffer = _with_room(self._buffer)
        self._buffer[self._length, 0] = token_id
        self._length += 1

    def row_bytes(self, start: int, stop: int) -> bytes:
        """Returns the exact bytes of rows [start, stop). Raises ValueError for rows that are not there."""
        if not 0 <= start <= stop <= self._length:
            raise ValueError(
                f"rows [{start}, {stop}) were requested, [0, {self._length}) are known; append the rest"
            )
        return self._buffer[start:stop].tobytes()

    def chunks(self, start: int, stop: int, size: int) -> Iterator[bytes]:
        """Yields the exact bytes of rows [start, stop) in runs of `size` rows, the last maybe shorter."""
        data, size = self.row_bytes(start, stop), size * ROW_BYTES
        return (data[at : at + size] for at in range(0, len(data), size))

    def copy(self) -> TokenIdentity:
        """Returns a copy that grows separately, for a forked request."""
        return TokenIdentity(self.rows)

    def __reduce__(self) -> tuple[type[TokenIdentity], tuple[Int64Array]]:
        return TokenIdentity, (self.rows,)


def _with_room(rows: Int64Array) -> Int64Array:
    """Returns a copy with zeros behind it: a text row needs only its first column written."""
    buffer = np.zeros((max(2 * len(rows), _LEAST_CAPACITY), ROW_COLUMNS), np.int64)
    buffer[: len(rows)] = rows
    return buffer


def token_identity(
    token_ids: Sequence[int], units: Sequence[tuple[PlaceholderRange, bytes]] = (), salt: bytes = b""
) -> TokenIdentity:
    """Returns the identity of a prompt.

    units: the place of each visual unit, and the 16 byte digest of its content.
    salt: 16 byte digest of the cache salt, or empty.
    Raises ValueError for a digest of another length or a unit outside of the prompt.
    """
    rows = np.zeros((len(token_ids), ROW_COLUMNS), np.int64)
    rows[:, 0] = token_ids
    for place, digest in units:
        if len(digest) != DIGEST_BYTES or place.stop > len(rows):
            raise ValueError(
                f"{place} with a digest of {len(digest)} bytes does not fit a prompt of {len(rows)} tokens; "
                f"digests have {DIGEST_BYTES} bytes"
            )
        rows[place.offset : place.stop, 0] = -1 - np.arange(place.length)
        rows[place.offset : place.stop, 1:] = np.frombuffer(digest, ">i8")
    if salt:
        rows[:1, 1:] ^= np.frombuffer(salt, ">i8").astype(np.int64)
    return TokenIdentity(rows)


def as_one(identity: TokenIdentity, span: range) -> TokenIdentity:
    """Returns an identity of which each token in `span` names all of these, since each depends on all."""
    rows = identity.rows.copy()
    digest = hashlib.blake2b(identity.row_bytes(span.start, span.stop), digest_size=DIGEST_BYTES).digest()
    rows[span.start : span.stop, 1:] = np.frombuffer(digest, ">i8")
    return TokenIdentity(rows)
