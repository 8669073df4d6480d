"""Turns a folder of videos, a list of media or a table into lines of our short form.

    videos/      each video of the folder, with the questions that are given       id "clip.mp4#1"
    shots/*.png  each file that matches, or the one that is named                  id "a.png#1"
    media.txt    each path or URL, a line each, with the questions that are given  id "clip.mp4#1"
    rows.csv     each row; its columns are the fields of a line                    its id, or its number
    rows.parquet the same, a file or a folder of parts. A list in `questions` makes a line for each

Each may be in an object store. A question may name columns in braces: {name}, {stem} and {path} of a medium,
or any column of a table.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

from epd.batch.lines import SHORT_KEYS, URL_PREFIXES, LineId
from epd.batch.places import Folder, copied, is_remote
from epd.batch.tables import ParquetTable, is_parquet
from epd.errors import MediaNotFoundError, RequestError

# Containers that are read; beside videos lie files of other kinds.
_NAMES = "mp4 m4v mov mkv webm avi ts mts m2ts mpg mpeg flv wmv asf ogv 3gp nut mxf"
VIDEO_SUFFIXES = frozenset(map(".{}".format, _NAMES.split()))
IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic"}
)
TABLE_SUFFIX, LIST_SUFFIX = ".csv", ".txt"
_PATTERN = frozenset("*?[")
_COLUMN = re.compile(r"\{([^{}]+)\}")
_QUESTIONS = "questions"  # a column of Parquet
_TEXT_KEYS = ("id", "video", "images", "question", "answer", "reduction")
_BEYOND = "cells beyond the columns"  # no field of a line: the line is refused by it
_MAX_CELL = 128 << 20


@dataclass(frozen=True, slots=True)
class _Item:
    """What is asked about. fields: of its line. columns: that questions may name. own: its questions."""

    line_id: LineId
    fields: Mapping[str, Any]
    columns: Mapping[str, str]
    is_row: bool = False
    own: Sequence[str] | None = None

    def records(self, asked: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields a line for each question; a row's own as it is. Raises RequestError for no such column."""
        if not asked and self.own is None:
            yield {"id": self.line_id, **self.fields}
        for number, question in enumerate(asked or self.own or (), start=1):
            is_only = self.is_row and len(asked) == 1
            line_id = self.line_id if is_only else f"{self.line_id}#{number}"
            filled = _COLUMN.sub(self._cell, question) if asked else question
            yield {"id": line_id, **self.fields, "question": filled}

    def _cell(self, found: re.Match[str]) -> str:
        if found[1] not in self.columns:
            raise RequestError(
                f"received a question with {{{found[1]}}}; allowed: {', '.join(self.columns)}; name one of "
                "these"
            )
        return self.columns[found[1]]


def is_lines(source: str | Path, *, has_questions: bool) -> bool:
    """Returns whether a source has lines already. A .txt is a list of media where questions are given."""
    suffix = PurePath(source).suffix.lower()
    is_list = has_questions and suffix == LIST_SUFFIX
    is_media = _is_folder(source) or _names_media(source)
    return not (is_media or suffix == TABLE_SUFFIX or is_list or is_parquet(source))


def is_table(source: str | Path) -> bool:
    """Returns whether the rows of a source may have questions of their own."""
    return is_parquet(source) or (PurePath(source).suffix.lower() == TABLE_SUFFIX and not _is_folder(source))


def _is_folder(source: str | Path) -> bool:
    return not PurePath(source).suffix if is_remote(source) else Path(source).is_dir()


def _names_media(source: str | Path) -> bool:
    """Returns whether a source is a medium, by its name, or a pattern of names."""
    is_pattern = bool(_PATTERN & set(str(source))) and not is_remote(source) and not Path(source).exists()
    return is_pattern or PurePath(source).suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES


def read_questions(path: Path) -> list[str]:
    """Returns the questions of a file, one a line. Raises RequestError where there is none."""
    asked = _lines(path, "a text file, a question a line")
    if not asked:
        raise RequestError(f"'{path}' holds no question; write one a line")
    return asked


def write_lines(out: Path, source: str | Path, asked: Sequence[str]) -> int:
    """Writes one line for each item and question; returns how many. asked: questions; none for a table's own.

    Raises RequestError where there is nothing to ask about or no question.
    """
    num_lines = 0
    with out.open("w", encoding="utf-8") as file, _long_cells():
        for item in _items(source, asked, out.parent):
            for record in item.records(asked):
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
                num_lines += 1
    return num_lines


def _items(source: str | Path, asked: Sequence[str], scratch: Path) -> Iterator[_Item]:
    """Yields what is asked about. scratch: a folder for the copy of a remote file."""
    folder = folder_of(source)
    if is_parquet(source):
        yield from _parquet_rows(source, folder, asked)
    elif _is_folder(source):
        yield from _media(source, _of_store(str(source)) if is_remote(source) else _of_folder(Path(source)))
    elif _names_media(source):
        yield from _media(source, _matching(str(source)))
    else:
        path = copied(str(source), scratch) if is_remote(source) else Path(source)
        if is_table(source):
            yield from _rows(path, folder, has_questions=bool(asked))
        else:
            yield from _media(source, _of_list(path, folder))


def folder_of(source: str | Path) -> str | Path:
    """Returns where relative paths of a file begin: a folder, of an object store its URI."""
    return str(source).rpartition("/")[0] if is_remote(source) else Path(source).absolute().parent


@contextmanager
def _long_cells() -> Iterator[None]:
    """Lets tables have long cells while open: the limit is of the whole process, where others read some."""
    limit = csv.field_size_limit(_MAX_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _media(source: str | Path, found: Sequence[tuple[PurePath, str]]) -> Iterator[_Item]:
    """Yields the media of a folder in order of their names, or those of a list."""
    if not found:
        allowed = f"files that end in {', '.join(sorted(VIDEO_SUFFIXES))}"
        raise RequestError(f"'{source}' holds no videos; allowed: {allowed}")
    for path, place in found:
        name, stem = _readable(path.name), _readable(path.stem)
        media = {"images": [place]} if path.suffix.lower() in IMAGE_SUFFIXES else {"video": place}
        yield _Item(name, media, {"name": name, "stem": stem, "path": place})


def _of_folder(folder: Path) -> list[tuple[PurePath, str]]:
    """Returns the videos of a folder: their paths, and as lines name them."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    return [(path, _named(path.absolute())) for path in paths]


def _matching(source: str) -> list[tuple[PurePath, str]]:
    """Returns the files that match a pattern, or the one that is named. Raises MediaNotFoundError."""
    if _is_url(source):
        return [(PurePath(urlsplit(source).path), source)]
    found = sorted(glob(source)) or [source]
    if _PATTERN & set(source) and found == [source] and not Path(source).exists():
        raise MediaNotFoundError(f"no file matches {source!r}; give the path of a video or image")
    return [(Path(each), _named(Path(each).absolute())) for each in found]


def _of_store(place: str) -> list[tuple[PurePath, str]]:
    return [(PurePath(name), f"{place.rstrip('/')}/{name}") for name in Folder(place).names(VIDEO_SUFFIXES)]


def _of_list(source: Path, folder: str | Path) -> list[tuple[PurePath, str]]:
    lines = _lines(source, "a text file, a path or URL a line")
    return [
        (PurePath(urlsplit(each).path if _is_url(each) else each), _place(each, folder)) for each in lines
    ]


def _rows(source: Path, folder: str | Path, *, has_questions: bool) -> Iterator[_Item]:
    """Yields the rows of a table with a head of columns. Raises RequestError."""
    try:
        with source.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey=_BEYOND, strict=True)
            _check_columns(source, reader.fieldnames or (), has_questions=has_questions)
            for number, row in enumerate(reader, start=1):
                yield _row(number, row, folder)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"cannot read '{source}': {error}; give a table in UTF-8 with commas") from error


def _parquet_rows(source: str | Path, folder: str | Path, asked: Sequence[str]) -> Iterator[_Item]:
    """Yields the rows of a table in Parquet. Only columns that are fields or that questions name are read."""
    table = ParquetTable(source)
    _check_columns(source, table.columns, has_questions=bool(asked) or _QUESTIONS in table.columns)
    for number, row in enumerate(table.rows(columns_for(asked)), start=1):
        yield _parquet_row(number, row, folder)


def columns_for(asked: Sequence[str]) -> set[str]:
    """Returns the columns of a table that are fields of lines, or that questions name."""
    return {*SHORT_KEYS, _QUESTIONS, *(name for question in asked for name in _COLUMN.findall(question))}


def records_of_row(row: Mapping[str, Any], asked: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the lines of a row of a table; without an id, its medium is one. Raises RequestError."""
    medium = row.get("video") or str(row.get("images"))
    named = row if row.get("id") is not None else {**row, "id": medium}
    return list(_parquet_row(0, named, Path("/")).records(asked))


def _parquet_row(number: int, row: Mapping[str, Any], folder: str | Path) -> _Item:
    """Returns the item of a row, whose values have types. Empty ones say nothing."""
    fields = {name: row[name] for name in SHORT_KEYS if row.get(name) is not None}
    if isinstance(video := fields.get("video"), str):
        fields["video"] = _place(video, folder)
    if isinstance(images := fields.get("images"), list):
        fields["images"] = [_place(str(each), folder) for each in images]
    own = None if row.get(_QUESTIONS) is None else list(row[_QUESTIONS])
    columns = {name: "" if value is None else str(value) for name, value in row.items()}
    return _Item(fields.pop("id", number), fields, columns, is_row=True, own=own)


def _check_columns(source: str | Path, columns: Sequence[str], *, has_questions: bool) -> None:
    if not has_questions and "question" not in columns:
        raise RequestError(
            f"'{source}' has no column question; allowed: with it, or --question; give one of the two"
        )
    if not {"video", "images"} & set(columns):
        raise RequestError(
            f"'{source}' has the columns {', '.join(columns)[:200] or 'none'}; allowed: with video or "
            f"images, and any of {', '.join(SHORT_KEYS)}; name the column of the media so"
        )


def _row(number: int, row: Mapping[str, Any], folder: str | Path) -> _Item:
    """Returns the item of a row. Cells of other columns are for questions alone. Empty ones say nothing."""
    cells = {name: cell for name, cell in row.items() if isinstance(cell, str)}
    fields = {name: _value(name, cells[name], folder) for name in SHORT_KEYS if cells.get(name)}
    if _BEYOND in row:
        fields[_BEYOND] = row[_BEYOND]
    return _Item(fields.pop("id", number), fields, cells, is_row=True)


def _value(name: str, cell: str, folder: str | Path) -> Any:
    """Returns the value of a cell; a number that is none stays text, which its line is refused for."""
    if name == "video":
        return _place(cell, folder)
    if name == "images":
        return [_place(each.strip(), folder) for each in cell.split(";") if each.strip()]
    if name not in _TEXT_KEYS:
        with suppress(ValueError):
            return json.loads(cell)
    return cell


def _place(named: str, folder: str | Path) -> str:
    if _is_url(named):
        return named
    return f"{folder}/{named}" if isinstance(folder, str) else str(folder / named)


def _is_url(named: str) -> bool:
    return named.startswith(URL_PREFIXES)


def _named(path: Path) -> str:
    """Returns a file as a line names it: by its path, or as a URI where that is no text."""
    return str(path) if _readable(str(path)) == str(path) else path.as_uri()


def _readable(name: str) -> str:
    """Returns a file's name with escapes for what is no text in the encoding of names."""
    return name.encode("utf-8", "backslashreplace").decode()


def _lines(path: Path, allowed: str) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read '{path}': {error}; give {allowed}") from error
    return [line.strip() for line in lines if line.strip()]
