"""Names for bytes: equal content has an equal name, wherever it came from."""

from __future__ import annotations

import hashlib
from pathlib import Path


def content_hash(path: str | Path) -> str:
    """The `mm_hash` of a file: BLAKE2b of all its bytes, 32 hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
