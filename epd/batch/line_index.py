"""Indexes the lines of an input file by their shared prefixes, in a temporary database.

The file may be longer than memory. One pass notes the place, id and group of each line; the unnamed temporary
file disappears with the process, however it ends. A line is read again when it is its turn.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from epd.batch.line_files import check_is_lines, whole_lines
from epd.batch.lines import BOM, BatchLine, Form, LineDefaults, LineError, LineId, id_key, parse_line
from epd.batch.media_names import SCHEMA as MEDIA_SCHEMA
from epd.batch.media_names import KnownMedium, MediaNames
from epd.batch.shared_prefix import shared_prefix
from epd.errors import RequestError

_SCHEMA = """
CREATE TABLE lines (
    number INTEGER PRIMARY KEY,
    key TEXT UNIQUE NOT NULL,
    start INTEGER NOT NULL,
    family BLOB
);
CREATE INDEX lines_by_family ON lines (family, number);
CREATE TABLE families (family BLOB PRIMARY KEY, num_bytes INTEGER NOT NULL, has_media INTEGER NOT NULL);
CREATE TABLE refused (number INTEGER PRIMARY KEY, message TEXT NOT NULL);
"""
_CHUNK = 256
_FORGET_CHUNK = 10_000
_PROGRESS_EVERY = 1000
_MAX_SHOWN = 100  # characters of an id in an error


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """Holds a line that cannot be asked. line_id: None if it has no readable id."""

    number: int
    line_id: LineId | None
    form: Form
    message: str


@dataclass(frozen=True, slots=True)
class LineGroup:
    """Groups lines with the same media before their questions.

    first: the number of its first line.
    num_bytes: of the media, 0 if unknown.
    has_media: whether there are any.
    """

    first: int
    num_lines: int
    num_bytes: int
    has_media: bool


class _Writer:
    """Writes the lines of a file into the database of an index, while it is read once."""

    def __init__(self, database: sqlite3.Connection, media: MediaNames, defaults: LineDefaults) -> None:
        self._database = database
        self._media = media
        self._defaults = defaults

    def add(self, text: bytes, number: int, start: int) -> None:
        """Adds a line. start: its place in the file."""
        try:
            line = parse_line(text, number, self._defaults)
            family = self._family(line)
        except LineError as error:
            key = _line_key(number) if error.line_id is None else id_key(error.line_id)
            self._refuse(_line_key(number) if self._twin(key) else key, number, start, str(error))
            return
        if twin := self._twin(line.key):
            if not self._was_refused(twin):
                message = f"it has the id {line.key[:_MAX_SHOWN]} of line {twin}; give each line its own"
                self._refuse(_line_key(number), number, start, message)
                return
            # A line that can be asked comes before one that cannot.
            self._database.execute("UPDATE lines SET key = ? WHERE number = ?", (_line_key(twin), twin))
        self._insert(number, line.key, start, family)

    def _twin(self, key: str) -> int:
        """Returns the number of the line that has a key, 0 for none."""
        found = self._database.execute("SELECT number FROM lines WHERE key = ?", (key,)).fetchone()
        return int(found[0]) if found else 0

    def _was_refused(self, number: int) -> bool:
        query = "SELECT 1 FROM refused WHERE number = ?"
        return self._database.execute(query, (number,)).fetchone() is not None

    def _refuse(self, key: str, number: int, start: int, message: str) -> None:
        self._insert(number, key, start, None)
        self._database.execute("INSERT INTO refused VALUES (?, ?)", (number, message))

    def _insert(self, number: int, key: str, start: int, family: bytes | None) -> None:
        self._database.execute("INSERT INTO lines VALUES (?, ?, ?, ?)", (number, key, start, family))

    def _family(self, line: BatchLine) -> bytes:
        """Returns the identity of a line's group."""
        prefix = shared_prefix(line.body)
        media: list[KnownMedium] = [self._media.find(url) for url in prefix.urls]
        name = repr(([each.media for each in media], prefix.frame)).encode()
        family = hashlib.blake2b(name, digest_size=16).digest()
        num_bytes = sum(each.num_bytes for each in media)
        self._database.execute(
            "INSERT OR IGNORE INTO families VALUES (?, ?, ?)", (family, num_bytes, bool(media))
        )
        return family


class _Rows:
    """Reads a database from any thread. lock: of its connection."""

    def __init__(self, database: sqlite3.Connection, lock: threading.Lock) -> None:
        self._database = database
        self._lock = lock

    def count(self, query: str) -> int:
        """Returns the number that a query yields."""
        with self._lock:
            return int(self._database.execute(query).fetchone()[0])

    def pages(self, query: str) -> Iterator[Any]:
        """Yields rows of a query whose first column rises, page by page: no cursor stays open."""
        last = 0
        while True:
            with self._lock:
                rows = self._database.execute(query, (last, _CHUNK)).fetchall()
            yield from rows
            if len(rows) < _CHUNK:
                return
            last = rows[-1][0]


class LineIndex:
    """Indexes an input file. Groups and lines may be read on any thread."""

    def __init__(self, source: Path, defaults: LineDefaults) -> None:
        """Opens the file. Raises RequestError for one that cannot be read."""
        self.source = source
        self._defaults = defaults
        self._max_line_bytes = defaults.max_line_bytes
        self._lock = threading.Lock()
        try:
            self._file = source.open("rb")
        except OSError as error:
            raise RequestError(f"cannot read '{source}': {error.strerror}; name a file of lines") from error
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._rows = _Rows(self._database, self._lock)
        self._database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
        self._database.executescript(MEDIA_SCHEMA + _SCHEMA)
        self.media = MediaNames(self._database, looks_at_files=not defaults.is_from_client)

    def close(self) -> None:
        self._file.close()
        self._database.close()

    def build(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Reads the whole file once. progress: called with the bytes read, and all. Raises RequestError."""
        size, start = self.source.stat().st_size, 0
        check_is_lines(self._file, self.source)
        lines = _Writer(self._database, self.media, self._defaults)
        self._database.execute("BEGIN")
        for number, (text, num_bytes) in enumerate(whole_lines(self._file, self._max_line_bytes), start=1):
            if text.removeprefix(BOM).strip():
                lines.add(text, number, start)
            start += num_bytes
            if number % _PROGRESS_EVERY == 0:
                progress(start, size)
        self._database.execute("COMMIT")

    def forget(self, keys: Iterable[str]) -> int:
        """Leaves out finished lines; returns their number."""
        num_before = self.num_lines
        remaining = iter(keys)
        while chunk := [(key,) for key in islice(remaining, _FORGET_CHUNK)]:
            self._database.executemany("DELETE FROM lines WHERE key = ?", chunk)
        return num_before - self.num_lines

    @property
    def num_lines(self) -> int:
        """Counts the lines that must be answered or explained."""
        return self._rows.count("SELECT count(*) FROM lines")

    @property
    def num_refused(self) -> int:
        """Counts those of them that cannot be asked."""
        return self._rows.count("SELECT count(*) FROM lines WHERE family IS NULL")

    @property
    def num_families(self) -> int:
        """Counts all groups."""
        return self._rows.count("SELECT count(DISTINCT family) FROM lines")

    @property
    def num_groups(self) -> int:
        """Counts the groups with media."""
        return self._rows.count(
            "SELECT count(DISTINCT lines.family) FROM lines JOIN families USING (family) WHERE has_media"
        )

    @property
    def lines_per_medium(self) -> float:
        """Returns the mean number of lines of a group that can be asked."""
        return (self.num_lines - self.num_refused) / max(1, self.num_families)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the media of all lines, as far as they are known; equal media count once."""
        return self._rows.count(
            "SELECT coalesce(sum(num_bytes), 0) FROM families"
            " WHERE family IN (SELECT family FROM lines WHERE family IS NOT NULL)"
        )

    @property
    def has_questions(self) -> bool:
        """Returns whether any question must be asked."""
        return self._rows.count("SELECT EXISTS (SELECT 1 FROM lines WHERE family IS NOT NULL)") > 0

    def refused(self) -> Iterator[RefusedLine]:
        """Yields the lines that cannot be asked, in order. One whose id another line has gets none."""
        query = (
            "SELECT number, start, message, key FROM lines JOIN refused USING (number) "
            "WHERE number > ? ORDER BY number LIMIT ?"
        )
        for number, start, message, key in self._rows.pages(query):
            try:
                form = self._read(start, number).form
            except LineError as error:
                form = error.form
            line_id = None if key == _line_key(number) else json.loads(key)
            yield RefusedLine(number, line_id, form, message)

    def groups(self) -> Iterator[LineGroup]:
        """Yields groups in order of their first lines."""
        with self._lock:
            self._database.executescript(
                "CREATE TEMP TABLE IF NOT EXISTS firsts AS"
                " SELECT min(number) AS first, count(*) AS num_lines, family FROM lines"
                " WHERE family IS NOT NULL GROUP BY family;"
                "CREATE INDEX IF NOT EXISTS firsts_in_order ON firsts (first);"
            )
        query = (
            "SELECT first, num_lines, num_bytes, has_media FROM firsts JOIN families USING (family) "
            "WHERE first > ? ORDER BY first LIMIT ?"
        )
        for first, num_lines, num_bytes, has_media in self._rows.pages(query):
            yield LineGroup(first, num_lines, num_bytes, bool(has_media))

    def lines(self, group: LineGroup) -> Iterator[BatchLine]:
        """Yields the lines of a group, in order. Raises RequestError when the file has changed."""
        query = (
            "SELECT number, start FROM lines WHERE family = (SELECT family FROM lines WHERE number = "
            f"{group.first:d}) AND number > ? ORDER BY number LIMIT ?"
        )
        for number, start in self._rows.pages(query):
            yield self._read(start, number)

    def _read(self, start: int, number: int) -> BatchLine:
        with self._lock:
            self._file.seek(start)
            text = self._file.readline(self._max_line_bytes + 1)
        return parse_line(text, number, self._defaults)


def _line_key(number: int) -> str:
    """Returns the key of a line without an id; no id is written like this."""
    return f"line {number}"
