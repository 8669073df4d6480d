"""Cuts what all questions about the same media share into pieces that are kept on disk, and names each.

    tokens    | system | media ........................ | question
    pieces    |   256   |   256   | ... |   256   | rest |         up to the prompt's `prefix_length`

A piece's key is a digest of all tokens up to its end. Equal keys follow equal prefixes, so a piece is right
wherever its key is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from epd.kv.prefix_cache import TokenIdentity

# Tokens of a piece, about. Fewer make more files; of more, more are lost where prompts differ within a piece.
PIECE_TOKENS = 256
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Names tokens [start, stop) of a prompt. index: among the prompt's pieces."""

    index: int
    start: int
    stop: int
    key: str

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def pieces(identity: TokenIdentity, num_tokens: int, size: int = PIECE_TOKENS) -> Iterator[Piece]:
    """Yields the pieces of the first `num_tokens` tokens, in order. size: tokens of each but the last."""
    digest = blake2b(digest_size=_KEY_BYTES)
    for index, start in enumerate(range(0, num_tokens, size)):
        stop = min(start + size, num_tokens)
        digest.update(identity.row_bytes(start, stop))
        yield Piece(index, start, stop, digest.hexdigest())
