"""Which local files may be read: regular ones, every link followed, within one folder, and not too large."""

from __future__ import annotations

import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from epd.errors import MediaForbiddenError, MediaLimitError, MediaNotFoundError


def allowed_file(source: str | Path, media_folder: Path | None, max_bytes: int) -> Path:
    """The file at a path or `file:` URL, every link followed. Nothing of it is read.

    Messages show no path but one that was given as a path, and do not tell whether there is a file outside
    of the folder.
    Raises MediaForbiddenError, MediaNotFoundError, MediaLimitError.
    """
    shown = "the file: URL" if _is_url(source) else str(source)
    if media_folder is None:
        raise MediaForbiddenError(f"received {shown}; allowed: none; set media_folder to allow a folder")
    path = _path_of(source)
    try:
        resolved = path.resolve()
        if not resolved.is_relative_to(media_folder.resolve()):
            raise MediaForbiddenError(
                f"{shown} is outside the media folder; allowed: files in it; move it there"
            )
        status = resolved.stat()
    except (OSError, ValueError, RuntimeError) as error:  # no file, a NUL in its name, a circle of links
        reason = error.strerror if isinstance(error, OSError) else "no such name"
        raise MediaNotFoundError(
            f"cannot read {shown}: {reason}; give the path of a readable file"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise MediaForbiddenError(f"{shown} is not a regular file; allowed: regular files; copy it to one")
    check_size(shown, status.st_size, max_bytes)
    return resolved


def check_size(what: str, num_bytes: int, max_bytes: int) -> None:
    """Raises MediaLimitError for more bytes than are allowed."""
    if num_bytes > max_bytes:
        raise MediaLimitError(
            f"{what} has {num_bytes} bytes; allowed {max_bytes}; shorten or scale the video"
        )


def _is_url(source: str | Path) -> bool:
    return isinstance(source, str) and source[:5].lower() == "file:"


def _path_of(source: str | Path) -> Path:
    if isinstance(source, Path) or not _is_url(source):
        return Path(source)
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise MediaNotFoundError(
            f"received a file: URL that cannot be read ({error}); allowed file:///PATH; mend it"
        ) from error
    if parts.netloc not in ("", "localhost"):
        raise MediaForbiddenError(
            f"received a file on the host {parts.netloc}; allowed: local files; use http(s)"
        )
    return Path(unquote(parts.path))
