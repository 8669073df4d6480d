"""Finds what is wrong with what was asked before anything slow is imported."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from urllib.parse import unquote, urlsplit

from epd.errors import MediaNotFoundError, RequestError
from epd.serve_app.request_options import kind_of

_EXAMPLE = 'epd ask clip.mp4 "What happens?"'
# Ends of the names of media. Files of other names are media where they are there.
_ENDINGS = frozenset(
    (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts", ".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp")
) | {".wav", ".mp3", ".flac", ".m4a", ".ogg"}
STDIN = "-"
_PATTERN = frozenset("*?[")


def media_and_question(words: Sequence[str]) -> tuple[list[str], str]:
    """Parts what was asked about from the question, which is the first or the last word.

    Raises RequestError where one of the two is missing.
    """
    is_media = [_is_medium(word) for word in words]
    if not words:
        raise RequestError(f"received neither media nor a question; write both: {_EXAMPLE}")
    if all(is_media):
        raise RequestError(
            f"received no question about {words[-1]!r}; write it in quotes behind the media: {_EXAMPLE}"
        )
    if len(words) == 1:
        raise RequestError(f"received {words[0]!r} and no video or image; write one before it: {_EXAMPLE}")
    if is_media[-1] and not is_media[0]:
        return list(words[1:]), words[0]
    return list(words[:-1]), words[-1]


def _is_medium(word: str) -> bool:
    if "://" in word or word.startswith("data:") or word == STDIN:
        return True
    is_name = len(word.split()) == 1 and Path(word).suffix.lower() in _ENDINGS
    return is_name or (0 < len(word) < 256 and Path(word).exists())


def is_terminal() -> bool:
    """Returns whether stdin is one, so that no file comes from there."""
    return sys.stdin.isatty()


@contextmanager
def media_at_hand(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yields names of media with a file in the place of "-", which has what comes from stdin."""
    if STDIN not in paths:
        yield list(paths)
        return
    with stdin_file("media") as file:
        yield [str(file) if path == STDIN else path for path in paths]


@contextmanager
def stdin_file(what: str = "lines") -> Iterator[Path]:
    """Yields a file with what comes from stdin. Raises RequestError where stdin is a terminal."""
    if is_terminal():
        raise RequestError(
            f"received - for {what}, and stdin is a terminal; pipe a file into it, or name one"
        )
    with NamedTemporaryFile(prefix="epd-stdin-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def check_media(paths: Sequence[str]) -> None:
    """Raises MediaError or RequestError for a folder, and for a file that is no medium or is not there."""
    for path in paths:
        if Path(path).is_dir():
            raise RequestError(
                f"{path!r} is a folder; name its files, as {path.rstrip('/')}/*.mp4 without quotes, or ask "
                "about each of them: epd batch FOLDER OUT.jsonl --questions FILE"
            )
        if _PATTERN & set(path) and "://" not in path and not Path(path).exists():
            raise MediaNotFoundError(f"no file matches {path!r}; give the path of a video or image")
        kind_of(path)


def as_path(name: str) -> str:
    """Returns the path of the file that a file:// URL names; all else as it is."""
    return unquote(urlsplit(name).path) if name.startswith("file://") else name


@contextmanager
def output_to(path: Path | None) -> Iterator[None]:
    """Writes to a file what the block prints on stdout, if it ends well. Does nothing without a path."""
    if path is None or str(path) == STDIN:
        yield
        return
    text = StringIO()
    with redirect_stdout(text):
        yield
    path.write_text(text.getvalue(), encoding="utf-8")
