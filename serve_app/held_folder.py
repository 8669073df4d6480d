"""Folders that belong to living processes, whatever ends these and whichever container they run in.

Every process that uses such a folder holds a shared lock on a file in it, which the kernel lets go of when
the process ends. A folder whose lock can be had for oneself is nobody's. Process ids do not tell: containers
that share a folder such as /dev/shm each count their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Of the folders that media of requests lie in, and of those that clusters are started in.
SPOOL_PREFIX, CLUSTER_PREFIX = "epd-media-", "epd-ray-"
_LOCK = ".held"
_own: list[HeldFolder] = []


class HeldFolder:
    """A folder that this process holds from now on, made if it is not there. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _locked(path)
        _own.append(self)

    def release(self) -> None:
        """Lets go of the folder, which stays for others that hold it, or for `remove_abandoned`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            _own.remove(self)

    def remove(self) -> None:
        """Removes the folder with everything in it, whoever else holds it."""
        remove_held(self.path)
        self.release()


def _locked(path: Path) -> int:
    """A descriptor with a shared lock on the folder's lock file, which may be removed until we have it."""
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
    """Whether a path still names the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def remove_own() -> None:
    """Removes all folders that this process holds, for one that is about to end without a clean-up."""
    for folder in _own.copy():
        folder.remove()


def remove_held(path: Path) -> None:
    """Removes a folder, its lock last: until then nobody takes it for one that is not in use."""
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
    """Folders below `parent` with such names that no process holds; ones never held are not ours to judge."""
    found = []
    for path in _folders(parent, prefix):
        with _alone_in(path) as is_abandoned:
            if is_abandoned:
                found.append(path)
    return found


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes those folders: what processes left behind that were killed."""
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
    """Whether nobody holds the folder; while this is open, nobody who comes can."""
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
