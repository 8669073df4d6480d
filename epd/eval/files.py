"""Reads question files, and what a record's fields say of a video, a question and its right answer.

    {"video": "a.mp4", "question": "What colour is the star?", "answer": "red"}
    {"videoID": "fFjv93ACGo8", "question": "Who wins?", "options": ["A. A cat.", "B. A dog."], "answer": "B"}
    {"video_path": "86CxyhFV9MI.mp4", "question": "Who?", "candidates": ["cat", "dog"], "correct_choice": 1}

The second is a record of Video-MME, the third one of LongVideoBench. Names in use elsewhere are understood
too, see `_VIDEO`, `_OPTIONS`, `_KIND` and `_ID`; other fields, such as those of subtitles, are ignored.
Records are read in these forms:

    {"video": "a.mp4", "question": ...}                     a line each, by default
    [{"video_path": "a.mp4", "question": ...}, ...]         an array, as of LongVideoBench
    [{"video_id": "001", "questions": [{...}, ...]}, ...]   the same by video, as of Video-MME
    video_path,question,...                                 a table with a header, in .csv and .tsv
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

from epd.errors import MediaNotFoundError, RequestError
from epd.eval.items import DURATION_NAMES, LETTERS, EvalItem, EvalVideo

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = b"PAR1"
_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'" + r'|"(?:[^"\\]|\\.)*"', re.DOTALL)
_VIDEO = ("video", "video_path", "videoID", "video_id")
_OPTIONS = ("options", "candidates", "choices")
_KIND = ("kind", "task_type", "question_type", "question_category")
_ID = ("question_id", "id")
_CHOICE = "correct_choice"
# LongVideoBench gives the longest seconds of a group; `duration` is a word of Video-MME's, or seconds.
_DURATION_GROUP = ("duration_group", "duration_category")
# Where data sets have their videos, seen from the file of questions, and the endings of names without one.
_FOLDERS = ("", "videos", "video", "data")
_ENDINGS = ("", ".mp4", ".MP4", ".mkv", ".webm")
_NO_OPTION = "N/A"
_LETTERED = re.compile(r"\(?([A-J])[).:]\s*(.*)", re.DOTALL)


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


def read_videos(path: Path, media_folder: Path | None = None) -> list[EvalVideo]:
    """Returns the videos of a question file, in the order they are first named, each with all its questions.

    media_folder: where relative paths start; by default the file's own folder.
    Raises RequestError for invalid records, MediaNotFoundError for a video that is not there.
    """
    folder = media_folder or path.parent
    items: dict[str, list[EvalItem]] = {}
    places: dict[str, str] = {}
    for record in read_records(path):
        source, item = _source(record, folder), _item(record)
        if item.item_id in places:
            raise record.error(
                f"has the id {item.item_id!r} of {places[item.item_id]}; give each question its own"
            )
        places[item.item_id] = record.place
        items.setdefault(source, []).append(item)
    if not items:
        raise RequestError(f"{str(path)!r} has no questions; give it one JSON object a line")
    return [EvalVideo(source, source, tuple(mine)) for source, mine in items.items()]


def _source(record: QuestionRecord, folder: Path) -> str:
    named = record.first(_VIDEO)
    if not isinstance(named, str) or not named.strip():
        raise record.error(f"names no video, it has {_known(record)}; give it one of {', '.join(_VIDEO)}")
    if "://" in named:
        return named
    for place in _FOLDERS:
        for ending in _ENDINGS:
            source = folder / place / f"{named}{ending}"
            if source.is_file():
                return str(source)
    raise MediaNotFoundError(
        f"{record.place} of {str(record.path)!r} is about {str(folder / named)!r}, which is not a file; "
        "correct it, or say with --video-dir where the videos are"
    )


def _item(record: QuestionRecord) -> EvalItem:
    question = record.fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise record.error(f"has no question, it has {_known(record)}; give it a question")
    options = _options(record)
    answer = _letter(record, options) if options else _words(record)
    kind = record.first(_KIND)
    item_id = record.first(_ID)
    return EvalItem(
        str(item_id) if item_id is not None else record.place.replace(" ", "-"),
        question.strip(),
        answer,
        options,
        str(kind) if kind is not None else "",
        _duration_group(record),
    )


def _duration_group(record: QuestionRecord) -> str:
    """Returns how long the video is, roughly, in the data set's words; "" if it does not say."""
    group = record.first(_DURATION_GROUP)
    if group is not None:
        return str(group)
    duration = record.fields.get("duration")
    return duration if duration in DURATION_NAMES else ""


def _options(record: QuestionRecord) -> tuple[str, ...]:
    """Returns the options without their letters; () for a question without any."""
    given = record.first(_OPTIONS)
    if given is None:
        given = _numbered_options(record)
        if not given:
            return ()
    if isinstance(given, dict):
        given = [f"{letter}. {text}" for letter, text in given.items()]
    if isinstance(given, str):
        given = listed_texts(given) or [text for text in given.splitlines() if text.strip()]
    if not isinstance(given, list) or not 2 <= len(given) <= len(LETTERS):
        raise record.error(f"has the options {given!r}; give a list of 2 to {len(LETTERS)}")
    texts = [str(text).strip() for text in given]
    matches = [_LETTERED.fullmatch(text) for text in texts]
    if all(match and match[1] == letter for match, letter in zip(matches, LETTERS, strict=False)):
        texts = [match[2].strip() for match in matches if match]
    return tuple(texts)


def _numbered_options(record: QuestionRecord) -> list[Any]:
    """Returns option0, option1, ..., as LongVideoBench's tables have them, without those that are empty."""
    values = [record.fields.get(f"option{number}") for number in range(len(LETTERS))]
    return [value for value in values if value not in (None, _NO_OPTION)]


def _letter(record: QuestionRecord, options: tuple[str, ...]) -> str:
    """Returns the right option's letter; the file may give that, the option's words, or its index."""
    letters = LETTERS[: len(options)]
    answer = record.fields.get("answer")
    if answer is None and record.fields.get(_CHOICE) is not None:
        return _letter_at(record, letters)
    given = str(answer).strip()
    lettered = _LETTERED.fullmatch(given)
    letter = lettered[1] if lettered else given.upper()
    if len(letter) == 1 and letter in letters:
        return letter
    same = [known for known, option in zip(letters, options, strict=True) if option == given]
    if len(same) != 1:
        raise record.error(
            f"has the answer {answer!r}; give the right option's letter, {letters[0]} to {letters[-1]}, its "
            f"words, or its index from 0 as {_CHOICE}; questions without answers cannot be judged"
        )
    return same[0]


def _letter_at(record: QuestionRecord, letters: str) -> str:
    """Returns the letter of the option whose index, from 0, the record has. Tables have it as a text."""
    given = record.fields[_CHOICE]
    is_index = isinstance(given, int | str) and not isinstance(given, bool) and str(given).isdecimal()
    if not is_index or int(given) >= len(letters):
        raise record.error(
            f"has the {_CHOICE} {given!r}; give the right option's index, 0 to {len(letters) - 1}"
        )
    return letters[int(given)]


def _words(record: QuestionRecord) -> str:
    answer = record.fields.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise record.error(f"has the answer {answer!r}; give a text or a number, or options and a letter")
    return str(answer)


def _known(record: QuestionRecord) -> str:
    return ", ".join(map(repr, record.fields)) or "nothing"
