"""Files in memory that pools of workers are made of: named for the fleet, so that none outlives it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

_MEMORY_FOLDER = Path("/dev/shm")
_PREFIX = "epd"


class PoolFiles:
    """Makes and removes the files of one fleet on this machine. fleet_id: one that no other fleet has."""

    def __init__(self, fleet_id: str) -> None:
        self.prefix = f"{_PREFIX}-{fleet_id}-"

    def create(self, name: str, num_bytes: int) -> Path:
        """A new file for a pool, empty, which takes memory as it is written."""
        descriptor, path = tempfile.mkstemp(prefix=f"{self.prefix}{name}-", dir=_folder(num_bytes))
        try:
            os.ftruncate(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        return Path(path)

    def shared(self, name: str, num_bytes: int, write: Callable[[Path], None]) -> Path:
        """A file that all workers of the fleet have on this machine, written by the first that wants it.

        Raises OSError, and what `write` raises.
        """
        path = _folder(num_bytes) / f"{self.prefix}{name}"
        found = self.paths(name)
        if found:
            return found[0]
        lock = path.with_name(f"{self.prefix}lock-{name}")
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found = self.paths(name)
            if not found:
                draft = path.with_name(f"{self.prefix}draft-{name}")
                try:
                    write(draft)
                    draft.rename(path)
                finally:
                    draft.unlink(missing_ok=True)
        return found[0] if found else path

    def remove(self, path: Path) -> None:
        """Removes the name; who has mapped it keeps the memory."""
        path.unlink(missing_ok=True)

    def remove_of(self, worker: str) -> None:
        """Removes all files of a worker that is gone."""
        for path in self.paths(f"{worker}."):
            self.remove(path)

    def remove_all(self) -> None:
        for path in self.paths():
            self.remove(path)

    def paths(self, name: str = "") -> list[Path]:
        """Those of ends whose names start with `name`."""
        found: list[Path] = []
        for folder in {_MEMORY_FOLDER, Path(tempfile.gettempdir())}:
            with contextlib.suppress(OSError):
                found += [path for path in folder.iterdir() if path.name.startswith(self.prefix + name)]
        return sorted(found)


def new_fleet_id() -> str:
    """A name for the files of a fleet of this process: those of one that was killed can be told by it."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_orphans() -> None:
    """Removes files of fleets whose process, on this machine, is gone."""
    for path in PoolFiles(_host()).paths():
        owner = path.name.split("-")[2]
        if owner.isdigit() and not Path("/proc", owner).exists():
            path.unlink(missing_ok=True)


def _host() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def _folder(num_bytes: int) -> Path:
    """Where a file of that size fits: in memory if there is room, so that nothing is written to a disk."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(_MEMORY_FOLDER).free >= num_bytes:
            return _MEMORY_FOLDER
    return Path(tempfile.gettempdir())
