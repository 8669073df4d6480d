"""Names for bytes: equal content has an equal name, wherever it came from."""

from __future__ import annotations

import hashlib
from pathlib import Path


def content_hash(path: str | Path | int) -> str:
    """The `mm_hash` of a file: BLAKE2b of all its bytes, 32 hexadecimal digits.

    path: or a descriptor, which stays open and is read from where it is.
    """
    with open(path, "rb", closefd=not isinstance(path, int)) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
