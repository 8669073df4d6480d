"""Writes the results of a run as a folder of Parquet parts: a row for each line, answered or explained.

    OUT/part-003-000000.parquet     answers of the third run
    OUT/failed-003-000000.parquet   failures of it
    OUT/_manifest.json              names the parts that count; written last, whole

A part counts from the moment that the manifest names it. A line that is asked again leaves its part of
failures in the same write that its new result comes in, so at each moment every line has one row at most.
What a killed run wrote beyond its manifest is deleted by the next run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import epd
from epd.batch.lines import JSON
from epd.batch.places import Folder, arrow, is_remote, telling
from epd.batch.records import key_of
from epd.batch.result_files import Tally, open_locked
from epd.batch.tables import PARQUET_SUFFIX, part_row, part_table
from epd.errors import RequestError, StorageFullError

_MANIFEST, _LOCK = "_manifest.json", "_lock"
_ANSWERS, _FAILURES = "part", "failed"


@dataclass(frozen=True, slots=True)
class PartsFolder:
    """Names a folder of parts.

    place: a path, or the URI of one in an object store.
    max_attempts: runs that ask a line that the server could not answer. Then it is in quarantine, as a line
        that is wrong itself is at once.
    max_rows, max_age_s: of what is not written yet.
    """

    place: str
    max_attempts: int = 3
    max_rows: int = 4096
    max_age_s: float = 30.0

    @property
    def failures(self) -> str:
        """Returns the parts of failures, for people."""
        return f"{self.place.rstrip('/')}/{_FAILURES}-*{PARQUET_SUFFIX}"


@dataclass(slots=True)
class _Failure:
    """Is a failure of an earlier run that is asked again. part: that has its row."""

    part: str
    num_attempts: int


class ResultParts:
    """Implements `Results`. Memory holds the rows that are not written, and the failures asked again."""

    def __init__(self, out: PartsFolder) -> None:
        """Raises RequestError for a folder that cannot be written, or that another run writes."""
        self.tally = Tally()
        self._out = out
        self._folder = Folder(out.place)
        self._lock = None if is_remote(out.place) else _locked(Path(self._folder.place))
        self._answers: list[JSON] = []
        self._failures: list[JSON] = []
        self._oldest_s = 0.0
        self._again: dict[str, _Failure] = {}
        self._retries_all = False
        self._run = self._num_written = 0
        self._parts: dict[str, int] = {}
        try:
            self._begin()
        except BaseException:
            self._unlock()
            raise

    def _begin(self) -> None:
        """Claims the folder for this run, and deletes what a killed one left."""
        manifest = self._manifest()
        self._parts = {each["name"]: each["rows"] for each in manifest.get("parts", [])}
        self._run = int(manifest.get("run", 0)) + 1
        with telling(self._folder.place):
            for name in self._folder.names({PARQUET_SUFFIX}):
                if name not in self._parts and name.startswith((f"{_ANSWERS}-", f"{_FAILURES}-")):
                    self._folder.delete(name)
            self._write_manifest(self._parts)

    def close(self) -> None:
        """Writes what is left, and ends the lock. Raises EPDError where that fails."""
        try:
            self._commit()
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def forget_failed(self) -> None:
        self._retries_all = True

    def done(self) -> Iterator[str]:
        for name in self._parts:
            for row in self._read(name, ["key", "is_right", "error"]):
                is_error = row["error"] is not None
                if is_error and self._is_asked_again(row["error"]):
                    self._again[row["key"]] = _Failure(name, row["error"]["attempts"])
                    continue
                right = {} if row["is_right"] is None else {"is_right": row["is_right"]}
                self.tally.count({"error": row["error"], **right}, is_error=is_error)
                yield row["key"]

    def _is_asked_again(self, error: Mapping[str, Any]) -> bool:
        status = error["status"] or 0
        may_pass = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
        return self._retries_all or (may_pass and error["attempts"] < self._out.max_attempts)

    def add(self, results: Sequence[JSON], errors: Sequence[JSON]) -> None:
        """Takes records; writes them when they are many, or old."""
        self._oldest_s = self._oldest_s or time.monotonic()
        for records, rows in ((results, self._answers), (errors, self._failures)):
            for record in records:
                self.tally.count(record, is_error=records is errors)
                rows.append(self._row(record))
        num_rows = len(self._answers) + len(self._failures)
        if num_rows >= self._out.max_rows or time.monotonic() - self._oldest_s > self._out.max_age_s:
            self._commit()

    def _row(self, record: JSON) -> JSON:
        before = self._again.get(key_of(record) or "")
        return part_row(record, 1 + (before.num_attempts if before else 0))

    def _commit(self) -> None:
        """Writes the rows and the manifest that names their parts. Raises StorageFullError, RequestError."""
        self._oldest_s = 0.0
        keys = {row["key"] for row in (*self._answers, *self._failures)}
        if not keys:
            return
        old = {self._again[key].part for key in keys if key in self._again}
        kept = [row for name in old for row in self._read(name) if row["key"] not in keys]
        try:
            self._check_is_ours()
            answers = self._write_part(_ANSWERS, self._answers)
            failures = self._write_part(_FAILURES, [*kept, *self._failures])
            parts = {name: rows for name, rows in self._parts.items() if name not in old}
            self._write_manifest(parts | answers | failures)
        except OSError as error:
            raise StorageFullError(
                f"cannot write to '{self._folder.place}': {error}; run it again when the disk or store works"
            ) from error
        self._parts = parts | answers | failures
        for key in keys:
            self._again.pop(key, None)
        for row in kept:
            if row["key"] in self._again:
                self._again[row["key"]].part = next(iter(failures))
        self._answers.clear()
        self._failures.clear()
        for name in old:
            self._folder.delete(name)

    def _write_part(self, kind: str, rows: Sequence[JSON]) -> dict[str, int]:
        """Writes a part, none for no rows. Returns its name and number of rows."""
        if not rows:
            return {}
        name = f"{kind}-{self._run:03d}-{self._num_written:06d}{PARQUET_SUFFIX}"
        data = arrow("pyarrow").BufferOutputStream()
        arrow("pyarrow.parquet").write_table(part_table(rows), data)
        self._folder.write(name, data.getvalue())
        self._num_written += 1
        return {name: len(rows)}

    def _read(self, name: str, columns: list[str] | None = None) -> Iterator[JSON]:
        with arrow("pyarrow.parquet").ParquetFile(
            self._folder.at(name), filesystem=self._folder.filesystem
        ) as part:
            for batch in part.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()

    def _manifest(self) -> JSON:
        """Returns the manifest, empty where there is none. Raises RequestError for a file that is none."""
        data = self._folder.read(_MANIFEST)
        found: Any = {} if data is None else None
        with suppress(ValueError):
            found = found if data is None else json.loads(data)
        if not isinstance(found, dict):
            raise RequestError(f"'{self._folder.place}/{_MANIFEST}' is no manifest; name another folder")
        return found

    def _check_is_ours(self) -> None:
        """Raises RequestError where another run has begun to write: an object store has no locks."""
        run = self._manifest().get("run")
        if run != self._run:
            raise RequestError(
                f"run {run} writes to '{self._folder.place}' since run {self._run} began; wait for its end, "
                "or name another folder"
            )

    def _write_manifest(self, parts: Mapping[str, int]) -> None:
        named = [{"name": name, "rows": num_rows} for name, num_rows in parts.items()]
        manifest = {"version": epd.__version__, "run": self._run, "parts": named}
        self._folder.write(_MANIFEST, json.dumps(manifest, indent=1).encode())


def _locked(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot write '{folder}': {error.strerror}; name a folder of yours") from error
    return open_locked(folder / _LOCK)
