"""Reads tables in Parquet, a file or a folder of parts, some rows at a time and only the columns needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from epd.batch.places import Folder, arrow, is_remote, telling

PARQUET_SUFFIX = ".parquet"
_ROWS = 256
_BUFFER_BYTES = 1 << 20


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
