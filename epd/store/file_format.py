"""Reads and writes files of pieces: each says of what it has under which names.

    header | payloads

    header    magic | number of payloads | of each its key, bytes, and digest of namespace, key and payload

A file is written under another name and then gets its own, so that it is whole or not there.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from io import BufferedIOBase, FileIO, RawIOBase
from itertools import accumulate
from pathlib import Path
from tempfile import mkstemp

_MAGIC = b"EPDKV004"
_HEADER, _ENTRY = struct.Struct("<8sH"), struct.Struct("<16sQ16s")
_DIGEST_BYTES = 16
# Number of pieces that share a file at most.
_MOST_TOGETHER = 1024
# Bytes of a file that are read at a time to verify it.
_PART_BYTES = 1 << 20
# Seconds by which a piece is dated before the one that it follows: more than passes between their writes.
_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Payload:
    """Is a payload that is to be written. digest: its `piece_digest`."""

    key: str
    data: memoryview
    digest: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a payload is in a file. file_bytes: of all of the file."""

    start: int
    num_bytes: int
    digest: bytes
    file_bytes: int


def runs(pieces: Sequence[Payload], most_bytes: int) -> Iterator[list[Payload]]:
    """Yields those that share a file, in order: up to a size, or one that is larger."""
    run, num_bytes = list[Payload](), 0
    for each in pieces:
        if run and (len(run) == _MOST_TOGETHER or num_bytes + len(each.data) > most_bytes):
            yield run
            run, num_bytes = [], 0
        run.append(each)
        num_bytes += len(each.data)
    if run:
        yield run


def header_of(pieces: Sequence[Payload]) -> memoryview:
    """Returns the header of a file that has these."""
    entries = [_ENTRY.pack(bytes.fromhex(each.key), len(each.data), each.digest) for each in pieces]
    return memoryview(_HEADER.pack(_MAGIC, len(pieces)) + b"".join(entries))


def written(folder: Path, *parts: memoryview, index: int = 0) -> Path:
    """Writes a file of this user alone, dated as `date` does. Raises OSError, and leaves nothing."""
    opened, name = mkstemp(prefix=".", dir=folder)
    own = Path(name)
    try:
        with open(opened, "wb", buffering=0) as file:
            for part in parts:
                num_written = 0
                while num_written < len(part):
                    num_written += file.write(part[num_written:])
        date(own, index)
    except OSError:
        own.unlink(missing_ok=True)
        raise
    return own


def date(path: str | Path, index: int) -> None:
    """Dates a file as used now; of a prompt, later pieces a little earlier."""
    used_s = time.time() - index * _STEP_S
    with suppress(OSError):
        os.utime(path, (used_s, used_s))


def fill(path: str, namespace: str, key: str, payload: memoryview) -> bool:
    """Reads a payload of a file. False if it is not there, or another than the file's header says."""
    try:
        with FileIO(path) as file:
            return fill_from(file, namespace, key, payload)
    except OSError:
        return False


def fill_from(file: RawIOBase | BufferedIOBase, namespace: str, key: str, payload: memoryview) -> bool:
    """Reads a payload out of an open file: see `fill`. Raises OSError."""
    try:
        at = place(file, key)
    except ValueError:
        return False
    if at.num_bytes != len(payload) or file.readinto(payload) != len(payload):
        return False
    return piece_digest(namespace, key, payload) == at.digest


def is_whole(path: Path) -> bool:
    """Returns whether a file has what its header says of its name. Reads it part by part."""
    try:
        with path.open("rb") as file:
            return holds(file, path.parts[-3], path.name)
    except OSError:
        return False


def holds(file: BufferedIOBase, namespace: str, key: str) -> bool:
    """Returns whether an open file is whole: see `is_whole`. Raises OSError."""
    found = sha256(_name_of(namespace, key))
    try:
        at = place(file, key)
    except ValueError:
        return False
    left = at.num_bytes
    while left and (part := file.read(min(left, _PART_BYTES))):
        found.update(part)
        left -= len(part)
    is_long = file.seek(0, os.SEEK_END) == at.file_bytes
    return is_long and not left and found.digest()[:_DIGEST_BYTES] == at.digest


def place(file: RawIOBase | BufferedIOBase, key: str) -> Place:
    """Returns what a header says of a piece, and goes there. Raises OSError, or ValueError for nothing."""
    try:
        magic, count = _HEADER.unpack(file.read(_HEADER.size))
        rows = list(_ENTRY.iter_unpack(file.read(count * _ENTRY.size)))
        starts = list(accumulate((num_bytes for _, num_bytes, _ in rows), initial=file.tell()))
        for (each, num_bytes, digest), start in zip(rows, starts, strict=False):
            if magic == _MAGIC and len(rows) == count and each.hex() == key:
                file.seek(start)
                return Place(start, num_bytes, digest, starts[-1])
    except (struct.error, OverflowError) as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"nothing is said of {key}")


def piece_digest(namespace: str, key: str, payload: memoryview) -> bytes:
    """Returns what a payload must match: so that one under another name is none of that name."""
    digest = sha256(_name_of(namespace, key))
    digest.update(payload)
    return digest.digest()[:_DIGEST_BYTES]


def _name_of(namespace: str, key: str) -> bytes:
    return f"{namespace}/{key}/".encode()
