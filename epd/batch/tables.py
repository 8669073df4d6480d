"""Reads tables in Parquet, a file or a folder of parts, some rows at a time and only the columns needed.

Gives results the columns of a table: of parts in Parquet, and of Ray Data.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import epd
from epd.batch.lines import JSON
from epd.batch.places import Folder, arrow, is_remote, telling
from epd.batch.records import key_of
from epd.batch.result_files import cells_of

PARQUET_SUFFIX = ".parquet"
_ROWS = 256
_BUFFER_BYTES = 1 << 20
_TEXTS = (
    "id", "uri", "question", "answer", "json", "finish_reason", "expected", "model", "model_digest",
    "version", "key",
)  # fmt: skip
_COUNTS = ("line", "prompt_tokens", "completion_tokens", "frames", "substituted_frames")


def is_parquet(source: str | Path) -> bool:
    """Returns whether a source is a Parquet file, or a folder that has some."""
    if str(source).lower().endswith(PARQUET_SUFFIX):
        return True
    if is_remote(source):
        return bool(Folder(source).names({PARQUET_SUFFIX}))
    return Path(source).is_dir() and any(each.is_file() for each in Path(source).glob(f"*{PARQUET_SUFFIX}"))


class ParquetTable:
    """Opens the parts of a table. columns: of the first part, in order."""

    def __init__(self, source: str | Path) -> None:
        """Raises RequestError where nothing can be read."""
        self._source = str(source)
        is_file = self._source.lower().endswith(PARQUET_SUFFIX) and (
            is_remote(source) or not Path(source).is_dir()
        )
        if is_file:
            place, _, name = self._source.rpartition("/") if is_remote(source) else ("", "", "")
            self._folder = Folder(place or Path(source).absolute().parent)
            self._names = [name or Path(source).name]
        else:
            self._folder = Folder(source)
            self._names = self._folder.names({PARQUET_SUFFIX})
        with telling(source), self._open(self._names[0]) as part:
            self.columns: list[str] = part.schema_arrow.names

    def _open(self, name: str) -> Any:
        return arrow("pyarrow.parquet").ParquetFile(
            self._folder.at(name),
            filesystem=self._folder.filesystem,
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
        )

    def rows(self, columns: Collection[str]) -> Iterator[dict[str, Any]]:
        """Yields the rows of all parts, each with those of the columns that its part has."""
        for name in self._names:
            with telling(f"{self._folder.place}/{name}"), self._open(name) as part:
                named = [column for column in part.schema_arrow.names if column in columns]
                for batch in part.iter_batches(batch_size=_ROWS, columns=named):
                    yield from batch.to_pylist()


def part_row(record: JSON, num_attempts: int = 1) -> JSON:
    """Returns the row of a record of either form. num_attempts: runs that have asked it, with this one."""
    cells = cells_of(record)
    row = {name: cells.get(name) for name in (*_COUNTS, "video_s", "frame_times_s", *_TEXTS)}
    line_id, error = cells.get("id"), record.get("error")
    return row | {
        "id": None if line_id is None else str(line_id),
        "uri": cells["media"] or None,
        "json": _json(cells.get("answer")),
        "key": key_of(record),
        "version": epd.__version__,
        "is_right": record.get("is_right"),
        "error": error
        and {
            "type": cells["error"],
            "message": cells["message"],
            "status": error.get("status") or (record.get("response") or {}).get("status_code"),
            "attempts": num_attempts,
        },
    }


def part_table(rows: Sequence[JSON]) -> Any:
    """Returns rows as a table of pyarrow, whose columns have the same types whatever the rows."""
    pa = arrow("pyarrow")
    texts, numbers = ("type", "message"), ("status", "attempts")
    error = [*((name, pa.string()) for name in texts), *((name, pa.int32()) for name in numbers)]
    columns = [
        *((name, pa.string()) for name in _TEXTS),
        *((name, pa.int64()) for name in _COUNTS),
        ("video_s", pa.float64()),
        ("frame_times_s", pa.list_(pa.float64())),
        ("is_right", pa.bool_()),
        ("error", pa.struct(error)),
    ]
    return pa.Table.from_pylist(list(rows), pa.schema(columns))


def _json(answer: Any) -> str | None:
    """Returns an answer that is an object or a list of JSON, in one form; None for any other."""
    with suppress(ValueError, RecursionError):
        found = json.loads(answer) if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "[") else None
        return None if found is None else json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return None
