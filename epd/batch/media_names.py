"""Finds which media are the same: by name first, and by their bytes only if two files have equal size."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from epd.types import content_hash

_MAX_KNOWN = 4096

SCHEMA = """
CREATE TABLE media (
    media INTEGER PRIMARY KEY,
    name TEXT UNIQUE NOT NULL,
    num_bytes INTEGER NOT NULL,
    path TEXT,
    hash TEXT,
    same_as INTEGER
);
CREATE INDEX media_by_size ON media (num_bytes);
"""


@dataclass(frozen=True, slots=True)
class KnownMedium:
    """Identifies a medium. media: equal for equal content. num_bytes: 0 if unknown."""

    media: int
    num_bytes: int


class MediaNames:
    """Numbers media. A file is looked at once; its bytes are read only if another has its size."""

    def __init__(self, database: sqlite3.Connection, *, looks_at_files: bool = True) -> None:
        self._database = database
        self._looks_at_files = looks_at_files
        self._known: OrderedDict[str, KnownMedium] = OrderedDict()

    def find(self, url: str) -> KnownMedium:
        """Returns the medium at a URL. A missing file is a medium by itself; decoding it will fail."""
        label = url if len(url) < 512 else hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
        found = self._known.get(label)
        if found is None:
            found = self._known[label] = self._look_up(label, url)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def _look_up(self, label: str, url: str) -> KnownMedium:
        path = local_path(url) if self._looks_at_files else None
        if path is None:
            num_bytes = len(url) * 3 // 4 if url.startswith("data:") else 0
            return self._insert(label, num_bytes, None)
        try:
            path = path.resolve()
            status = path.stat()
        except (OSError, ValueError, RuntimeError):
            return self._insert(f"missing {label}", 0, None)
        name = f"{path} {status.st_size} {status.st_mtime_ns}"
        return self._insert(name, status.st_size, path)

    def _insert(self, name: str, num_bytes: int, path: Path | None) -> KnownMedium:
        query = "SELECT coalesce(same_as, media) FROM media WHERE name = ?"
        row = self._database.execute(query, (name,)).fetchone()
        if row is not None:
            return KnownMedium(row[0], num_bytes)
        twin = self._twin(path, num_bytes) if path is not None else None
        cursor = self._database.execute(
            "INSERT INTO media (name, num_bytes, path, same_as) VALUES (?, ?, ?, ?)",
            (name, num_bytes, path and str(path), twin),
        )
        media = cursor.lastrowid if twin is None else twin
        assert media is not None
        return KnownMedium(media, num_bytes)

    def _twin(self, path: Path, num_bytes: int) -> int | None:
        """Returns a file with the same bytes, known before."""
        query = (
            "SELECT media, path, hash FROM media WHERE num_bytes = ? AND path IS NOT NULL AND same_as IS NULL"
        )
        candidates = self._database.execute(query, (num_bytes,)).fetchall()
        ours = _hash_of(path) if candidates else None
        for media, other, known in candidates:
            theirs = known or _hash_of(Path(other))
            if theirs and not known:
                self._database.execute("UPDATE media SET hash = ? WHERE media = ?", (theirs, media))
            if ours is not None and theirs == ours:
                return int(media)
        return None

    def folder(self) -> Path | None:
        """Returns the deepest folder that all files are below, None without any."""
        common: list[str] | None = None
        for (path,) in self._database.execute("SELECT path FROM media WHERE path IS NOT NULL"):
            parts = list(Path(path).parent.parts)
            common = parts if common is None else _common(common, parts)
        return Path(*common) if common else None


def _common(one: list[str], other: list[str]) -> list[str]:
    num_equal = next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:num_equal]


def local_path(url: str) -> Path | None:
    """Returns the file of a file: URL, None for other URLs."""
    if url[:5].lower() != "file:":
        return None
    try:
        return Path(os.fsdecode(unquote_to_bytes(urlsplit(url).path)))
    except ValueError:
        return None


def _hash_of(path: Path) -> str | None:
    try:
        return content_hash(path)
    except OSError:
        return None
