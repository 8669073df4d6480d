"""Manages the files of one request's media: written in pieces within budgets, and deleted together."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from epd.errors import CancelledError, MediaLimitError, OverloadedError, StorageFullError

_RETRY_AFTER_S = 2.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class ByteBudget:
    """Limits the bytes that all requests together may hold. Thread-safe."""

    def __init__(self, max_bytes: int, what: str) -> None:
        self._free = self._max = max_bytes
        self._what = what
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Takes bytes from the budget. Raises OverloadedError if too few are free."""
        with self._lock:
            if num_bytes > self._free:
                raise OverloadedError(
                    f"{num_bytes} bytes of {self._what} do not fit beside those of other requests; "
                    f"allowed {self._max} in all; retry later",
                    _RETRY_AFTER_S,
                )
            self._free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._free += num_bytes

    @property
    def num_taken(self) -> int:
        return self._max - self._free


@contextmanager
def refusing_when_full() -> Iterator[None]:
    """Turns the errors of a full disk into StorageFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFullError(
            f"the disk for media is full ({error.strerror}); retry later, or send smaller media"
        ) from error


class RequestFolder:
    """Holds the spooled media of one request. Late threads find it closed and leave nothing behind."""

    def __init__(self, parent: Path, budget: ByteBudget, max_bytes: int) -> None:
        """Starts without files. max_bytes: of this request alone. Raises StorageFullError."""
        self._budget = budget
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_files = 0
        self._is_open = True
        self._path: Path | None = None  # created with the first file: most requests have none
        self._parent = parent

    def new_file(self) -> SpooledFile:
        """Creates an empty file. Raises StorageFullError, CancelledError once the request has ended."""
        with self._lock, refusing_when_full():
            self._check_open()
            if self._path is None:
                self._path = Path(tempfile.mkdtemp(dir=self._parent))
            self._num_files += 1
            return SpooledFile(self, self._path / f"{self._num_files}")

    def take(self, num_bytes: int) -> None:
        """Reserves bytes. Raises OverloadedError for a full spool, MediaLimitError, CancelledError."""
        with self._lock:
            self._check_open()
            if self._num_bytes + num_bytes > self._max_bytes:
                raise MediaLimitError(
                    f"the media of the request have {self._num_bytes + num_bytes} bytes or more; "
                    f"allowed {self._max_bytes}; send fewer or smaller ones"
                )
            self._budget.take(num_bytes)
            self._num_bytes += num_bytes

    def _check_open(self) -> None:
        if not self._is_open:
            raise CancelledError("the request of this medium has ended")

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            if self._path is not None:
                shutil.rmtree(self._path, ignore_errors=True)
            self._budget.give_back(self._num_bytes)
            self._num_bytes = 0


class SpooledFile:
    """Writes to a file as a `video.Sink`. Reserves bytes before writing, all at once if announced."""

    def __init__(self, folder: RequestFolder, path: Path) -> None:
        self.path = path
        self._folder = folder
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._num_free = 0  # reserved and not written yet

    def expect(self, num_bytes: int) -> None:
        """Reserves the announced bytes. Raises OverloadedError, MediaLimitError."""
        self._folder.take(num_bytes)
        self._num_free += num_bytes

    def write(self, chunk: bytes) -> None:
        """Writes a chunk. Raises OverloadedError, MediaLimitError, StorageFullError."""
        missing = len(chunk) - self._num_free
        if missing > 0:
            self.expect(missing)
        self._num_free -= len(chunk)
        with refusing_when_full():
            view = memoryview(chunk)
            while view:
                view = view[os.write(self._file, view) :]

    def __enter__(self) -> SpooledFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)
