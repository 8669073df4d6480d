"""Reads question files: one JSON object a line, with a video, a question, and options or an answer.

    {"video": "a.mp4", "question": "What colour is the star?", "answer": "red"}
    {"videoID": "fFjv93ACGo8", "question": "Who wins?", "options": ["A. A cat.", "B. A dog."], "answer": "B"}

`videoID` is that of Video-MME: a file name without .mp4. Names in use elsewhere are understood too, see
`_VIDEO`, `_OPTIONS`, `_KIND` and `_ID`; other fields are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd.errors import MediaNotFoundError, RequestError
from epd.eval.items import LETTERS, EvalItem, EvalVideo

_VIDEO = ("video", "video_path", "videoID")
_OPTIONS = ("options", "candidates", "choices")
_KIND = ("kind", "task_type", "question_type")
_ID = ("question_id", "id")
_LETTERED = re.compile(r"\(?([A-J])[).:]\s*(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _QuestionLine:
    """Holds one object of a file, and its place."""

    path: Path
    number: int
    fields: dict[str, Any]

    def error(self, problem: str) -> RequestError:
        return RequestError(f"line {self.number} of {str(self.path)!r} {problem}")

    def first(self, names: Sequence[str]) -> Any:
        """Returns the value of the first of these fields that exists, or None."""
        return next((self.fields[name] for name in names if self.fields.get(name) is not None), None)


def read_videos(path: Path, media_folder: Path | None = None) -> list[EvalVideo]:
    """Returns the videos of a question file, in the order they are first named, each with all its questions.

    media_folder: where relative paths start; by default the file's own folder.
    Raises RequestError for invalid lines, MediaNotFoundError for a video that is not there.
    """
    folder = media_folder or path.parent
    items: dict[str, list[EvalItem]] = {}
    lines: dict[str, int] = {}
    for line in _lines(path):
        source, item = _source(line, folder), _item(line)
        if item.item_id in lines:
            raise line.error(
                f"has the id {item.item_id!r} of line {lines[item.item_id]}; give each question its own"
            )
        lines[item.item_id] = line.number
        items.setdefault(source, []).append(item)
    if not items:
        raise RequestError(f"{str(path)!r} has no questions; give it one JSON object a line")
    return [EvalVideo(source, source, tuple(mine)) for source, mine in items.items()]


def _lines(path: Path) -> list[_QuestionLine]:
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the questions {str(path)!r} cannot be read: {error}; give a JSONL file"
        ) from None
    return [_parsed(path, number, text) for number, text in enumerate(texts, start=1) if text.strip()]


def _parsed(path: Path, number: int, text: str) -> _QuestionLine:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise _QuestionLine(path, number, {}).error(
            f"is not JSON ({error}); give one object a line, such as "
            '{"video": "a.mp4", "question": "...", "answer": "..."}'
        ) from None
    if not isinstance(fields, dict):
        raise _QuestionLine(path, number, {}).error(
            f"is a JSON {type(fields).__name__}; give one object a line with video, question and answer"
        )
    return _QuestionLine(path, number, fields)


def _source(line: _QuestionLine, folder: Path) -> str:
    named = line.first(_VIDEO)
    if not isinstance(named, str) or not named.strip():
        raise line.error(f"names no video, it has {_known(line)}; give it one of {', '.join(_VIDEO)}")
    if "://" in named:
        return named
    is_id = named == line.fields.get("videoID") and not Path(named).suffix
    source = folder / (f"{named}.mp4" if is_id else named)
    if not source.is_file():
        raise MediaNotFoundError(
            f"line {line.number} of {str(line.path)!r} is about {str(source)!r}, which is not a file; "
            "correct it, or say with --video-dir where the videos are"
        )
    return str(source)


def _item(line: _QuestionLine) -> EvalItem:
    question = line.fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise line.error(f"has no question, it has {_known(line)}; give it a question")
    options = _options(line)
    answer = _letter(line, options) if options else _words(line)
    kind = line.first(_KIND)
    item_id = line.first(_ID)
    return EvalItem(
        str(item_id) if item_id is not None else f"line-{line.number}",
        question.strip(),
        answer,
        options,
        str(kind) if kind is not None else "",
    )


def _options(line: _QuestionLine) -> tuple[str, ...]:
    """Returns the options without their letters; () for a question without any."""
    given = line.first(_OPTIONS)
    if given is None:
        return ()
    if isinstance(given, dict):
        given = [f"{letter}. {text}" for letter, text in given.items()]
    if isinstance(given, str):
        given = [text for text in given.splitlines() if text.strip()]
    if not isinstance(given, list) or not 2 <= len(given) <= len(LETTERS):
        raise line.error(f"has the options {given!r}; give a list of 2 to {len(LETTERS)}")
    texts = [str(text).strip() for text in given]
    matches = [_LETTERED.fullmatch(text) for text in texts]
    if all(match and match[1] == letter for match, letter in zip(matches, LETTERS, strict=False)):
        texts = [match[2].strip() for match in matches if match]
    return tuple(texts)


def _letter(line: _QuestionLine, options: tuple[str, ...]) -> str:
    """Returns the right option's letter; the file may give that or the option's words."""
    letters = LETTERS[: len(options)]
    given = str(line.fields.get("answer", "")).strip()
    lettered = _LETTERED.fullmatch(given)
    letter = lettered[1] if lettered else given.upper()
    if len(letter) == 1 and letter in letters:
        return letter
    same = [known for known, option in zip(letters, options, strict=True) if option == given]
    if len(same) != 1:
        raise line.error(
            f"has the answer {line.fields.get('answer')!r}; give the right option's letter, "
            f"{letters[0]} to {letters[-1]}, or its words"
        )
    return same[0]


def _words(line: _QuestionLine) -> str:
    answer = line.fields.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise line.error(f"has the answer {answer!r}; give a text or a number, or options and a letter")
    return str(answer)


def _known(line: _QuestionLine) -> str:
    return ", ".join(map(repr, line.fields)) or "nothing"
