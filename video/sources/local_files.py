"""Decides which local files may be read: regular ones, every link followed, within one folder, not too large.

A file is read through the descriptor it was checked by, or found again by its identity, so another file that
takes its name in between is never read.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from epd.errors import MediaForbiddenError, MediaLimitError, MediaNotFoundError


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file it is, and in which state. mtime_ns: when it was changed last, Unix time."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int


class OpenFile:
    """A regular file that is open for reading; the caller closes it."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor."""
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.is_regular = stat.S_ISREG(status.st_mode)
        self.identity = FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def source(self) -> str:
        """A path to this very file in this process, whatever its name refers to by now."""
        return f"/proc/self/fd/{self.descriptor}"

    @property
    def path(self) -> Path:
        """Where the file is now."""
        return Path(os.readlink(self.source))

    def close(self) -> None:
        """Closes the file; calling it again does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_file(path: Path, shown: str, identity: FileIdentity | None = None) -> OpenFile:
    """Opens a regular file, no link at its end followed. shown: what messages call it.

    identity: the file that it must still be, if given. Raises MediaNotFoundError, MediaForbiddenError.
    """
    try:
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except (OSError, ValueError) as error:
        raise _unreadable(shown, error) from error
    if not file.is_regular or (identity is not None and file.identity != identity):
        file.close()
        raise (_irregular(shown) if not file.is_regular else _changed(shown))
    return file


def open_allowed(source: str | Path, media_folder: Path | None, max_bytes: int) -> OpenFile:
    """Opens what `allowed_file` allows, and checks what was opened. Raises as `allowed_file` does."""
    path = allowed_file(source, media_folder, max_bytes)
    shown = _shown(source)
    file = open_file(path, shown)
    try:
        if media_folder is None or not file.path.is_relative_to(media_folder.resolve()):
            raise _outside(shown)
        check_size(shown, file.identity.num_bytes, max_bytes)
    except BaseException:
        file.close()
        raise
    return file


def allowed_file(source: str | Path, media_folder: Path | None, max_bytes: int) -> Path:
    """Returns the file at a path or `file:` URL, every link followed. Nothing of it is read.

    Messages show only a path that was given as a path, and do not reveal whether a file exists outside of the
    folder. Raises MediaForbiddenError, MediaNotFoundError, MediaLimitError.
    """
    shown = _shown(source)
    if media_folder is None:
        raise MediaForbiddenError(f"received {shown}; allowed: none; set media_folder to allow a folder")
    path = _path_of(source)
    try:
        resolved = path.resolve()
        if not resolved.is_relative_to(media_folder.resolve()):
            raise _outside(shown)
        status = resolved.stat()
    except (OSError, ValueError, RuntimeError) as error:  # no file, a NUL in its name, a circle of links
        raise _unreadable(shown, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(shown)
    check_size(shown, status.st_size, max_bytes)
    return resolved


def check_size(what: str, num_bytes: int, max_bytes: int) -> None:
    """Raises MediaLimitError for more bytes than are allowed."""
    if num_bytes > max_bytes:
        raise MediaLimitError(
            f"{what} has {num_bytes} bytes; allowed {max_bytes}; shorten or scale the video"
        )


def _shown(source: str | Path) -> str:
    return "the file: URL" if _is_url(source) else str(source)


def _outside(shown: str) -> MediaForbiddenError:
    return MediaForbiddenError(f"{shown} is outside the media folder; allowed: files in it; move it there")


def _irregular(shown: str) -> MediaForbiddenError:
    return MediaForbiddenError(f"{shown} is not a regular file; allowed: regular files; copy it to one")


def _changed(shown: str) -> MediaNotFoundError:
    return MediaNotFoundError(
        f"{shown} was changed during the request; allowed: files that stay as they are; ask again"
    )


def _unreadable(shown: str, error: Exception) -> MediaNotFoundError:
    reason = error.strerror if isinstance(error, OSError) else "no such name"
    return MediaNotFoundError(f"cannot read {shown}: {reason}; give the path of a readable file")


def _is_url(source: str | Path) -> bool:
    return isinstance(source, str) and source[:5].lower() == "file:"


def _path_of(source: str | Path) -> Path:
    if isinstance(source, Path) or not _is_url(source):
        return Path(source)
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise MediaNotFoundError(
            f"received a file: URL that cannot be read ({error}); allowed file:///PATH; correct it"
        ) from error
    if parts.netloc not in ("", "localhost"):
        raise MediaForbiddenError(
            f"received a file on the host {parts.netloc}; allowed: local files; use http(s)"
        )
    return Path(unquote(parts.path))
