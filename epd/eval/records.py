"""Reads the records of a question file: JSON lines, an array, videos with their questions, or a table.

    {"video": "a.mp4", "question": ...}                     a line each, by default
    [{"video_path": "a.mp4", "question": ...}, ...]         an array, as of LongVideoBench
    [{"video_id": "001", "questions": [{...}, ...]}, ...]   the same by video, as of Video-MME
    video_path,question,...                                 a table with a header, in .csv and .tsv

`epd/eval/files.py` says what the fields mean.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.errors import RequestError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = b"PAR1"
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'" + r'|"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """Holds the fields of one question, and its place in the file: "line 3", "item 3.1" or "row 3"."""

    path: Path
    place: str
    fields: dict[str, Any]

    def error(self, problem: str) -> RequestError:
        return RequestError(f"{self.place} of {str(self.path)!r} {problem}")

    def first(self, names: Sequence[str]) -> Any:
        """Returns the value of the first of these fields that exists, or None."""
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), None)


def read_records(path: Path) -> list[QuestionRecord]:
    """Returns the questions of a file in order. Raises RequestError for what is none of the forms above."""
    text = _text(path)
    delimiter = _DELIMITERS.get(path.suffix.lower())
    if delimiter is not None:
        return list(_rows(path, text, delimiter))
    if text.lstrip().startswith("["):
        return list(_items(path, text))
    lines = enumerate(text.split("\n"), start=1)
    return [_parsed_line(path, number, line) for number, line in lines if line.strip()]


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data.startswith(_PARQUET):
            raise RequestError(
                f"{str(path)!r} is a Parquet file; write its rows as JSON lines first, such as with pandas: "
                "read_parquet(...).to_json('questions.jsonl', orient='records', lines=True)"
            )
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the questions {str(path)!r} cannot be read: {error}; give a .jsonl, .json, .csv or .tsv file"
        ) from None


def _parsed_line(path: Path, number: int, text: str) -> QuestionRecord:
    place = f"line {number}"
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise QuestionRecord(path, place, {}).error(
            f"is not JSON ({error}); give one object a line, such as "
            '{"video": "a.mp4", "question": "...", "answer": "..."}, or an array of them'
        ) from None
    return _checked(path, place, fields)


def _items(path: Path, text: str) -> Iterator[QuestionRecord]:
    try:
        items = json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"{str(path)!r} begins as a JSON array and is none ({error}); correct it, or give JSON lines"
        ) from None
    for number, fields in enumerate(items, start=1):
        record = _checked(path, f"item {number}", fields)
        questions = record.fields.get("questions")
        if questions is None:
            yield record
        else:
            yield from _of_one_video(record, questions)


def _of_one_video(video: QuestionRecord, questions: Any) -> Iterator[QuestionRecord]:
    """Yields the questions of an item that is a video, each with the video's fields as well."""
    if not isinstance(questions, list):
        raise video.error("has questions that are no list; give a list of objects")
    shared = {name: value for name, value in video.fields.items() if name != "questions"}
    for number, fields in enumerate(questions, start=1):
        question = _checked(video.path, f"{video.place}.{number}", fields)
        yield QuestionRecord(video.path, question.place, shared | question.fields)


def _checked(path: Path, place: str, fields: Any) -> QuestionRecord:
    if not isinstance(fields, dict):
        raise QuestionRecord(path, place, {}).error(
            f"is a JSON {type(fields).__name__}; give an object with video, question and answer"
        )
    return QuestionRecord(path, place, fields)


def _rows(path: Path, text: str, delimiter: str) -> Iterator[QuestionRecord]:
    """Yields the rows of a table, which spreadsheets count from the header on; empty cells are no fields."""
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for number, cells in enumerate(reader, start=2):
            fields = {name: cell for name, cell in cells.items() if name is not None and cell}
            record = QuestionRecord(path, f"row {number}", fields)
            if None in cells:
                raise record.error("has more cells than the header; quote cells that hold the delimiter")
            yield record
    except csv.Error as error:
        raise RequestError(f"line {reader.line_num} of {str(path)!r} is not a table's ({error})") from None


def listed_texts(text: str) -> list[str] | None:
    """Returns the texts of a list as JSON, Python or NumPy write it in a cell; None for anything else.

    NumPy puts no commas between them: "['A. One.' 'B. Two.']".
    """
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        return None
    inner = inner[1:-1]
    if _LITERAL.sub("", inner).strip(", \n\r\t"):
        return None
    try:
        return [str(ast.literal_eval(literal)) for literal in _LITERAL.findall(inner)]
    except (ValueError, SyntaxError):
        return None
