"""Turns a folder of videos and a file of questions into lines of our short form."""

from __future__ import annotations

import json
from pathlib import Path

from epd.errors import RequestError

# Containers that are read; beside videos lie files of other kinds.
_NAMES = "mp4 m4v mov mkv webm avi ts mts m2ts mpg mpeg flv wmv asf ogv 3gp nut mxf"
VIDEO_SUFFIXES = frozenset(map(".{}".format, _NAMES.split()))


def write_lines(out: Path, folder: Path, questions: Path) -> int:
    """Writes one line for each video and question, named as in "clip.mp4#2"; returns how many.

    Videos are the files of the folder with a video suffix, in order of their names. Raises RequestError
    when there are no videos or no questions.
    """
    asked = _questions(questions)
    videos = sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    if not videos:
        raise RequestError(
            f"'{folder}' holds no videos; allowed: files that end in {', '.join(sorted(VIDEO_SUFFIXES))}"
        )
    with out.open("w", encoding="utf-8") as file:
        for path in videos:
            for number, question in enumerate(asked, start=1):
                name = f"{path.name}#{number}"
                record = {"id": _readable(name), "video": _video(path.absolute()), "question": question}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return len(videos) * len(asked)


def _video(path: Path) -> str:
    """Returns a file as a line names it: by its path, or as a URI where that is no text."""
    return str(path) if _readable(str(path)) == str(path) else path.as_uri()


def _readable(name: str) -> str:
    """Returns a file's name with escapes for what is no text in the encoding of names."""
    return name.encode("utf-8", "backslashreplace").decode()


def _questions(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read '{path}': {error}; give a text file, a question a line") from error
    asked = [line.strip() for line in lines if line.strip()]
    if not asked:
        raise RequestError(f"'{path}' holds no question; write one a line")
    return asked
