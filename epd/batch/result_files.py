"""Writes the two files of a run, OUT.jsonl and OUT.errors.jsonl: whole lines, each line of the input once.

A run that is killed leaves at most a torn last line, which the next run cuts off. Each line is added to the
end with one write, so readers never see half of one. The files are locked while a run writes to them; the
lock ends with its process.

`write_table` makes one table of both: a row for each line that was answered or explained.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from epd.batch.lines import JSON
from epd.batch.records import MODEL_FACTS, answer_text, key_of, reason_of, reported
from epd.errors import EPDError, RequestError, StorageFullError

# Bounds the loss when a machine crashes; a process that is killed loses nothing.
_SYNC_S = 1.0
_TAIL_BYTES = 1 << 16
# Of a disk, which may work again, and not of a path.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
# Start of every record.
_BEGINNING = b'{"id": '


@dataclass(slots=True)
class Reason:
    """Counts the lines that failed with the same error. example: what the first of them says."""

    example: str
    num_lines: int = 0


@dataclass(slots=True)
class Tally:
    """Counts the contents of the files. num_checked: answers whose line includes the right one."""

    num_answered: int = 0
    num_failed: int = 0
    num_checked: int = 0
    num_right: int = 0
    reasons: dict[str, Reason] = field(default_factory=dict)  # by the name of the error

    def count(self, record: JSON, *, is_error: bool) -> None:
        if is_error:
            kind, message = reason_of(record)
            self.reasons.setdefault(kind, Reason(message)).num_lines += 1
        self.num_failed += is_error
        self.num_answered += not is_error
        if "is_right" in record:
            self.num_checked += 1
            self.num_right += bool(record["is_right"])


class Results(Protocol):
    """Holds the results of all runs. One run at a time writes to them."""

    tally: Tally

    def forget_failed(self) -> None:
        """Has all failures asked again. Called before `done`."""
        ...

    def done(self) -> Iterator[str]:
        """Yields the keys of the lines that are answered or explained already; counts them."""
        ...

    def add(self, results: Sequence[JSON], errors: Sequence[JSON]) -> None: ...

    def close(self) -> None:
        """Keeps what was added, and ends the lock, also where the disk fails. Raises OSError then."""
        ...


def errors_path(out: Path) -> Path:
    """Returns OUT.errors.jsonl for OUT.jsonl."""
    return out.with_name(f"{out.stem}.errors{out.suffix}")


class ResultFiles:
    """Opens the files for adding, locked against other runs."""

    def __init__(self, out: Path) -> None:
        """Raises RequestError for files that cannot be written, or that another run writes."""
        self.tally = Tally()
        self._results = open_locked(out)
        try:
            self._errors = open_locked(errors_path(out))
        except EPDError:
            self._results.close()
            raise
        self._synced_s = time.monotonic()
        try:
            for file in (self._results, self._errors):
                _cut_torn_line(file)
        except (RequestError, OSError):
            self._errors.close()
            self._results.close()
            raise

    def close(self) -> None:
        """Closes the files and ends their locks, also where the disk fails. Raises OSError then."""
        try:
            self._sync()
        finally:
            self._errors.close()
            self._results.close()

    def forget_failed(self) -> None:
        """Drops all failures, so that their lines are asked again."""
        self._errors.truncate(0)

    def done(self) -> Iterator[str]:
        """Yields the keys of the lines that are answered or explained already; counts them."""
        for file in (self._results, self._errors):
            file.seek(0)
            for text in file:
                record = _record(text, file.name)
                key = key_of(record)
                if key is not None:
                    self.tally.count(record, is_error=file is self._errors)
                    yield key

    def add(self, results: Sequence[JSON], errors: Sequence[JSON]) -> None:
        """Writes records, each file's with one write."""
        self._write(self._results, results)
        self._write(self._errors, errors)
        if time.monotonic() - self._synced_s > _SYNC_S:
            self._sync()

    def _write(self, file: IO[bytes], records: Sequence[JSON]) -> None:
        for record in records:
            self.tally.count(record, is_error=file is self._errors)
        data = b"".join(_encoded(record) + b"\n" for record in records)
        while data:
            data = data[os.write(file.fileno(), data) :]

    def _sync(self) -> None:
        for file in (self._results, self._errors):
            os.fsync(file.fileno())
        self._synced_s = time.monotonic()


def _encoded(record: JSON) -> bytes:
    """Returns JSON in UTF-8. Halves of surrogate pairs, which a server may answer, stay escapes."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace")


def open_locked(path: Path) -> IO[bytes]:
    """Opens a file for adding that no other run has open. Raises RequestError, StorageFullError."""
    try:
        file = path.open("a+b")
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            raise StorageFullError(
                f"cannot write '{path}': {error.strerror}; run it again when the disk works"
            ) from error
        raise RequestError(
            f"cannot write '{path}': {error.strerror}; name a file in a folder of yours"
        ) from error
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RequestError(
            f"another run writes to '{path}'; wait for its end, or name another file"
        ) from error
    return file


def _cut_torn_line(file: IO[bytes]) -> None:
    """Ends the file with its last whole line. Raises RequestError when the rest is not a record of ours."""
    end = stop = file.seek(0, os.SEEK_END)
    while stop:
        start = max(0, stop - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(stop - start).rfind(b"\n")
        if newline >= 0:
            stop = start + newline + 1
            break
        stop = start
    file.seek(stop)
    rest = file.read(len(_BEGINNING))
    if not _BEGINNING.startswith(rest):
        raise RequestError(f"'{file.name}' ends with {rest!r}, which is not a result; name another file")
    if stop < end:
        file.truncate(stop)


def _record(text: bytes, name: str) -> JSON:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise RequestError(f"'{name}' holds {text[:60]!r}, which is not a result; name another file")
    return record


_COLUMNS = (
    "id", "media", "question", "answer", "finish_reason", "expected", "is_right", "prompt_tokens",
    "completion_tokens", "line", "error", "message",
)  # fmt: skip


def write_table(table: Path, results: Path) -> None:
    """Writes the table of the results of a run, and of its failures. A reader never sees half of it."""
    beside = table.with_name(f".{table.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(map(cells_of, _records(results)))
        writer.writerows(map(cells_of, _records(errors_path(results))))
    beside.replace(table)


def _records(path: Path) -> Iterator[JSON]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def cells_of(record: JSON) -> JSON:
    """Returns the cells of a record of either form."""
    row = {**record, "media": "; ".join(record.get("media", ()))}
    if "custom_id" in record:
        row["id"] = record["custom_id"]
        completion = (record["response"] or {}).get("body") or {}
        if record["error"] is None:
            row |= {name: completion.get(said) for name, said in MODEL_FACTS.items()}
            row |= {"usage": completion.get("usage")} | reported(completion)
            row["answer"] = answer_text(completion)
            row["finish_reason"] = completion["choices"][0]["finish_reason"]
    row |= row.get("usage") or {}
    if record.get("error"):
        row["error"], row["message"] = reason_of(record)
    return row
