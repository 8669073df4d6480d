"""Manages folders owned by live processes, however these end and in whichever container they run.

Every process that uses such a folder holds a shared lock on a file in it, which the kernel releases when the
process ends. A folder whose lock can be taken exclusively is abandoned. Process ids do not suffice:
containers that share a folder such as /dev/shm have separate ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Prefixes of the folders that hold media of requests, files of clients, and what clusters are started in.
SPOOL_PREFIX, FILES_PREFIX, CLUSTER_PREFIX = "epd-media-", "epd-files-", "epd-ray-"
_LOCK = ".held"
_own: list[HeldFolder] = []


class HeldFolder:
    """Holds a folder for this process, creating it if needed. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _locked(path)
        _own.append(self)

    def release(self) -> None:
        """Releases the folder, which remains for others that hold it, or for `remove_abandoned`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            _own.remove(self)

    def remove(self) -> None:
        """Removes the folder with everything in it, even if other processes hold it."""
        remove_held(self.path)
        self.release()


def _locked(path: Path) -> int:
    """Returns a descriptor with a shared lock on the folder's lock file, which may vanish until then."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_named(path / _LOCK, descriptor):
            return descriptor
        os.close(descriptor)


def _is_named(path: Path, descriptor: int) -> bool:
    """Returns whether a path still names the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def remove_own() -> None:
    """Removes all folders that this process holds, when it is about to end without a clean-up."""
    for folder in _own.copy():
        folder.remove()


def remove_held(path: Path) -> None:
    """Removes a folder, its lock last: until then no process considers it abandoned."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.name == _LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def abandoned(parent: Path, prefix: str) -> list[Path]:
    """Returns folders below `parent` with that prefix that were once held and that no process holds now."""
    found = []
    for path in _folders(parent, prefix):
        with _alone_in(path) as is_abandoned:
            if is_abandoned:
                found.append(path)
    return found


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes the folders that killed processes left behind."""
    for path in _folders(parent, prefix):
        with _alone_in(path) as is_abandoned:
            if is_abandoned:
                remove_held(path)


def _folders(parent: Path, prefix: str) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in parent.iterdir() if path.name.startswith(prefix))
    return []


@contextmanager
def _alone_in(path: Path) -> Iterator[bool]:
    """Yields whether no process holds the folder; while the block runs, none can start to."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # never held, gone meanwhile, or another user's
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield _is_named(path / _LOCK, descriptor)
    finally:
        os.close(descriptor)
